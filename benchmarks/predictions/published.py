"""What the planner's cost model says of published runs, beside the published seconds.

    python -m benchmarks.predictions.published

Each run's own time on one device gives its block's time; everything else is a constant of the hardware (presets.py), the
same for all its runs. `fitted` runs have set a constant, the others are predictions. No device is needed.
"""

from dataclasses import dataclass, replace

from benchmarks.predictions.presets import HARDWARE, MODELS, with_block
from parallel_backend.core.degrees import Degrees
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.prediction import predict

TEXT_SECONDS, MEGAPIXEL_SECONDS = 0.27, 0.23
"""Text encoders and VAE on A100 and H100, for a picture and for each million pixels of it (of all frames): outside of the
transformer, so no degree makes them fewer.
"""


@dataclass(frozen=True)
class Run:
    """`one`: seconds on one device. `whole`: they include text encoders and VAE. `compiled`: by torch.compile.

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

    @property
    def bands(self) -> int:
        """xDiT's default: as many as stages."""
        return self.degrees.pipe

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
)
"""L40: the PipeFusion paper (arXiv 2405.14430); its PixArt on 8 is 6.99 times as fast as on one, so VAE and text encoders
are not in it. The others: xDiT's docs/performance, whose scripts time the whole pipeline. 11.05 s: 4.2 times 2.63 s.
"""


def outside(run: Run, height: int, width: int) -> float:
    return TEXT_SECONDS + MEGAPIXEL_SECONDS * run.frames * height * width / 1e6 if run.whole else 0.0


def calibration(run: Run) -> Calibration:
    """With the block that makes the run on one device as long as published."""
    hardware, model = HARDWARE[run.hardware], MODELS[run.model]
    measured_on = (2048, 2048, False) if run.model == "flux-schnell" else (run.height, run.width, run.compiled)
    height, width, compiled = measured_on
    workload = model.workload(run.model, height, width, run.steps, text_in_bands=True)
    launch = 0.0 if compiled else hardware.launch
    block = model.block(replace(hardware, launch=launch))
    work = (run.one - outside(run, height, width)) / (run.steps * model.layers) - launch
    block = replace(
        block,
        fixed=0.0 if run.compiled else launch,
        token=block.token * work / (workload.entries * block.work(workload.tokens, workload.tokens)),
    )
    return with_block(hardware.calibration(run.degrees.world, model, hop=0.0), block)


def predicted(run: Run) -> float:
    """Seconds, with one warm-up step, text computed with every band and no hop through a sampler, as xDiT does it."""
    workload = MODELS[run.model].workload(run.model, run.height, run.width, run.steps, text_in_bands=True)
    found = predict(CalibratedCosts(calibration(run), workload), Mode(run.degrees, run.bands))
    return outside(run, run.height, run.width) + found.seconds


def main() -> None:
    print("| run | published s | model s | off by | |\n|---|---|---|---|---|")
    for run in RUNS:
        found = predicted(run)
        role = f"fitted: {run.fitted}" if run.fitted else "predicted"
        print(f"| {run} | {run.seconds:g} | {found:.2f} | {100 * (found / run.seconds - 1):+.0f} % | {role} |")


if __name__ == "__main__":
    main()
