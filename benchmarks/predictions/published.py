"""What the planner's cost model says of published runs, beside the published seconds.

    python -m benchmarks.predictions.published

Each run's own time on one device (or on the fewest that were published) gives its block's time. Everything else is a
constant of the hardware (presets.py), the same for all its runs. `fitted` runs have set a constant, the others are
predictions. Left out: the link's bandwidth is fitted again to the other runs on such links, then the run is predicted. No
device is needed.
"""

import math
import statistics
from dataclasses import dataclass, field, replace

from benchmarks.predictions.presets import HARDWARE, MODELS, OLD_SERVER, X16, Hardware, with_block
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.links import Link
from parallel_backend.planning.calibrated_costs import BlockCost, CalibratedCosts
from parallel_backend.planning.known_gpus import X8
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.prediction import predict

TEXT_SECONDS, MEGAPIXEL_SECONDS = 0.27, 0.23
"""Text encoders and VAE on A100 and H100, for a picture and for each million pixels of it (of all frames): outside of the
transformer, so no degree makes them fewer.
"""


@dataclass(frozen=True)
class Run:
    """`one`: seconds with `of`, mostly one device. `whole`: they include text encoders and VAE. `compiled`: by
    torch.compile.

    `fitted`: the constant that this figure has set; empty if it is predicted.
    """

    hardware: str
    model: str
    height: int
    width: int
    steps: int
    one: float
    degrees: Degrees
    seconds: float
    fitted: str = ""
    whole: bool = False
    compiled: bool = False
    frames: int = 1
    of: Degrees = field(default_factory=Degrees)

    def __str__(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        size = f"{self.width}" if self.width == self.height else f"{self.width} x {self.height}"
        return f"{self.model} {size}, {self.steps} steps, {self.hardware}{compiled}: {self.degrees}"


def flux_l40(one: float, size: int, degrees: Degrees, seconds: float, fitted: str = "") -> Run:
    return Run("L40", "flux-dev", size, size, 28, one, degrees, seconds, fitted)


def pixart(degrees: Degrees, seconds: float, fitted: str = "") -> Run:
    return Run("L40", "pixart", 2048, 2048, 20, 21.6, degrees, seconds, fitted)


def sd3(degrees: Degrees, seconds: float, fitted: str = "") -> Run:
    return Run("L40", "sd3-medium", 1024, 1024, 20, 3.92, degrees, seconds, fitted)


def schnell(size: int, seconds: float, fitted: str = "", compiled: bool = True) -> Run:
    one = 2.63 * 4.2  # of 2048 x 2048; the only published one
    return Run("A100", "flux-schnell", size, size, 4, one, Degrees(ulysses=8), seconds, fitted, True, compiled)


def flux_h100(degrees: Degrees, seconds: float) -> Run:
    return Run("H100", "flux-dev", 1024, 1024, 28, 4.30, degrees, seconds, whole=True, compiled=True)


def hunyuan(degrees: Degrees, seconds: float) -> Run:
    return Run("H100", "hunyuan-video", 720, 1280, 50, 1904.08, degrees, seconds, whole=True, frames=129)


X16_FITTED, X8_FITTED = "bandwidth of x16", "bandwidth of x8"


def wan_gb200(degrees: Degrees, seconds: float) -> Run:
    return Run("GB200", "wan-2.2-14b", 720, 1280, 40, 348.0, degrees, seconds)


def h3(hardware: str, steps: int, two: float, degrees: Degrees, seconds: float, fitted: str = "") -> Run:
    return Run(hardware, "minimax-h3", 768, 1344, steps, two, degrees, seconds, fitted, of=Degrees(ulysses=2))


def flux_l20(degrees: Degrees, seconds: float) -> Run:
    return Run("L20", "flux-dev", 1024, 1024, 28, 23.56, degrees, seconds, X16_FITTED)


def flux_4090(degrees: Degrees, seconds: float) -> Run:
    return Run("RTX 4090 x16", "flux-dev", 1024, 1024, 1, 0.259, degrees, seconds, X16_FITTED, of=Degrees(ulysses=4))


RUNS = (
    *(flux_l40(18.36, 1024, Degrees(pipe=n), seconds) for n, seconds in ((2, 11.03), (4, 7.05), (8, 5.53))),
    flux_l40(18.36, 1024, Degrees(ulysses=4), 17.0, fitted="bandwidth of a link"),
    flux_l40(18.36, 1024, Degrees(ulysses=8), 26.0, fitted="bandwidth between the sockets"),
    *(flux_l40(105.7, 2048, Degrees(pipe=n), seconds) for n, seconds in ((2, 58.2), (4, 30.1), (8, 18.7))),
    pixart(Degrees(batch=2, pipe=2), 5.43, fitted="a block's launch"),
    pixart(Degrees(batch=2, pipe=4), 3.09),
    sd3(Degrees(batch=2), 2.18, fitted="a block's launch"),
    sd3(Degrees(batch=2, pipe=2), 1.52),
    sd3(Degrees(batch=2, pipe=4), 1.26),
    schnell(1024, 0.93, fitted="text encoders", compiled=False),
    schnell(2048, 2.63, fitted="VAE", compiled=False),
    schnell(1024, 0.82),
    schnell(2048, 2.4),
    flux_h100(Degrees(ulysses=2), 2.68),
    flux_h100(Degrees(ring=2), 2.60),
    flux_h100(Degrees(ulysses=2, ring=2), 1.80),
    flux_h100(Degrees(ulysses=4), 1.63),
    flux_h100(Degrees(ring=4), 1.98),
    *(hunyuan(Degrees(ulysses=n), seconds) for n, seconds in ((2, 925.04), (4, 514.08), (8, 337.58))),
    Run("H100", "flux-dev", 1024, 1024, 50, 9.30, Degrees(ulysses=2), 6.04, whole=True),
    Run("H100", "qwen-image", 1024, 1024, 50, 18.49, Degrees(ulysses=2), 12.81, whole=True),
    Run("H100", "wan-2.2-14b", 480, 832, 1, 5.18, Degrees(ulysses=8), 0.75),
    *(wan_gb200(Degrees(batch=2, ulysses=n // 2), seconds) for n, seconds in ((2, 174.0), (4, 96.0), (8, 48.0))),
    *(h3("H20", 1, 12.762, Degrees(ulysses=n), seconds) for n, seconds in ((4, 6.547), (8, 3.314))),
    Run("H200", "minimax-h3", 768, 1344, 50, 71.7, Degrees(tensor=2, ulysses=2), 75.5, of=Degrees(ulysses=4)),
    *(h3("RTX PRO 5000", 50, 515.6, Degrees(ulysses=n), seconds, X16_FITTED) for n, seconds in ((4, 284.0), (8, 163.2))),
    flux_l20(Degrees(ulysses=2), 13.80),
    flux_l20(Degrees(ulysses=4), 8.28),
    flux_l20(Degrees(ring=4), 9.16),
    flux_l20(Degrees(ulysses=2, ring=2), 8.55),
    flux_4090(Degrees(ring=4), 0.339),
    flux_4090(Degrees(ulysses=2, ring=2), 0.322),
    Run("RTX 2000 Ada", "flux-dev", 1024, 1024, 1, 2.22, Degrees(ulysses=2), 1.26, X8_FITTED),
    Run("RTX 2000 Ada", "chroma", 1024, 1024, 1, 5.14, Degrees(ulysses=2), 3.24, X8_FITTED),
)
"""L40: the PipeFusion paper (arXiv 2405.14430); its PixArt on 8 is 6.99 times as fast as on one, so VAE and text encoders
are not in it. A100, and H100 up to HunyuanVideo: xDiT's docs/performance, whose scripts time the whole pipeline. 11.05 s is
4.2 times 2.63 s. Flux and Qwen-Image in 50 steps, and L20: cache-dit's docs. Wan on H100: LightX2V's README; on GB200:
TensorRT-LLM 13821. MiniMax H3, a video of 124 frames: vllm-omni 6163 (H20), its docs (RTX PRO 5000), SGLang 33398 (H200).
RTX 4090 with 48 GB: diffusers' docs. RTX 2000 Ada: raylight's README, whose size is taken to be 1024.
"""


def outside(run: Run, height: int, width: int) -> float:
    return TEXT_SECONDS + MEGAPIXEL_SECONDS * run.frames * height * width / 1e6 if run.whole else 0.0


def seconds(run: Run, hardware: Hardware, block: BlockCost, degrees: Degrees, height: int, width: int) -> float:
    """With one warm-up step, as many patches as stages, text computed with every patch and no hop through a sampler, as
    xDiT does it."""
    model = MODELS[run.model]
    on = with_block(hardware.calibration(degrees.world, model, hop=0.0), block)
    workload = model.workload(run.model, height, width, run.steps, text_in_bands=True)
    return outside(run, height, width) + predict(CalibratedCosts(on, workload), Mode(degrees, degrees.pipe)).seconds


def predicted(run: Run, hardware: Hardware | None = None) -> float:
    """Seconds, with the block that makes the run with `run.of` as long as published. `hardware`: in place of the preset."""
    hardware = hardware or HARDWARE[run.hardware]
    measured_on = (2048, 2048, False) if run.model == "flux-schnell" else (run.height, run.width, run.compiled)
    height, width, compiled = measured_on
    unit = MODELS[run.model].block(replace(hardware, launch=0.0 if compiled else hardware.launch))
    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(30):
        middle = (low + high) / 2
        block = replace(unit, token=unit.token * math.exp(middle))
        low, high = (middle, high) if seconds(run, hardware, block, run.of, height, width) < run.one else (low, middle)
    block = replace(block, fixed=0.0 if run.compiled else hardware.launch)
    return seconds(run, hardware, block, run.degrees, run.height, run.width)


BANDWIDTHS = (2e9, 2.5e9, 3e9, 3.5e9, 4e9, 5e9, 6e9, 8e9, 10e9, 12e9, 14e9, 16e9, 20e9, 25e9)


def with_links(run: Run, bandwidth: float) -> float:
    """Seconds predicted for links of this bandwidth."""
    hardware = HARDWARE[run.hardware]
    return predicted(run, replace(hardware, link=Link(hardware.link.latency, bandwidth)))


def left_out() -> dict[Run, float]:
    """Run -> seconds with a bandwidth that is fitted to the other runs over such links. NVLink's is the data sheet's."""
    found = {}
    for link in dict.fromkeys(HARDWARE[run.hardware].link for run in RUNS):
        runs = [run for run in RUNS if HARDWARE[run.hardware].link == link]
        if link not in (OLD_SERVER, X8, X16):
            found |= {run: predicted(run) for run in runs}
            continue
        seconds = {run: {bandwidth: with_links(run, bandwidth) for bandwidth in BANDWIDTHS} for run in runs}
        for run in runs:
            off = {
                bandwidth: statistics.fmean(
                    abs(math.log(seconds[each][bandwidth] / each.seconds)) for each in runs if each != run
                )
                for bandwidth in BANDWIDTHS
            }
            found[run] = seconds[run][min(off, key=off.__getitem__)]
    return found


def main() -> None:
    print("| run | published s | model s | off by | left out, off by | |\n|---|---|---|---|---|---|")
    off = {run: seconds / run.seconds - 1 for run, seconds in left_out().items()}
    for run in RUNS:
        found = predicted(run)
        role = f"fitted: {run.fitted}" if run.fitted else "predicted"
        error = f"{100 * (found / run.seconds - 1):+.0f} %"
        print(f"| {run} | {run.seconds:g} | {found:.2f} | {error} | {100 * off[run]:+.0f} % | {role} |", flush=True)
    worst = max(off, key=lambda run: abs(off[run]))
    median = statistics.median(map(abs, off.values()))
    print(f"\n{len(RUNS)} runs, left out: median {100 * median:.0f} %, worst {100 * off[worst]:+.0f} % ({worst})")


if __name__ == "__main__":
    main()
