"""What brings PipeFusion closer to the exact run, and at what cost in time: other exact steps, other orders of the bands.

    python -m benchmarks.fidelity.bands --out benchmarks/results/fidelity_mini_NAME_DATE.json

For each number of steps and of bands, on the trained mini model: the run as it is (first step exact, bands from the top of
the picture to its end), other exact steps, and other orders of the bands, each with the PSNR to the exact run (as in
quality.py), the digits read, and the time predicted on two even stages without transfers, in exact steps of one rank.
Orders: "up" is last band to first, "alternating" turns round at each step, "centre out" begins with the middle. A band sees
those before it in the order as they are in this step, the others extrapolated, as ever.

A step's micro-steps are posted in the order asked for and awaited before the next step, one run in one thread: what a
band sees depends on nothing else. With the present order the pictures equal those of the product bit for bit, which is
checked for each number of steps and bands. As in quality.py, split_batch shares the pictures out to use every core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import mini_model as mini
from benchmarks.harness.mini_model import CHUNK, judge, load, sample
from parallel_backend.client.call import PostedCall
from parallel_backend.client.pipefusion.banded_run import cut_rows
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.pipefusion_order import MicroStep
from parallel_backend.core.spans import Span
from parallel_backend.placement.pipeline_model import StageCost, by_share, simulate
from parallel_backend.processes.pool import wait_for
from testing.models import conditioning_of

STAGES = [StageCost(0.0, 0.5)] * 2

Order = Callable[[int, int], list[int]]
"""(step, bands) -> the bands as they go in that step."""


def _from_the_centre(step: int, bands: int) -> list[int]:
    return sorted(range(bands), key=lambda band: abs(2 * band + 1 - bands))


ORDERS: dict[str, Order] = {
    "down": lambda step, bands: list(range(bands)),
    "up": lambda step, bands: list(range(bands))[::-1],
    "alternating": lambda step, bands: list(range(bands))[:: 1 if step % 2 else -1],
    "centre out": _from_the_centre,
}


@dataclass(frozen=True)
class Variant:
    """`exact`: the exact steps, of 0 .. steps - 1."""

    exact: tuple[int, ...]
    order: str = "down"

    def micro_steps(self, steps: int, bands: int) -> list[MicroStep]:
        order = ORDERS[self.order]
        return [
            MicroStep(step, band) for step in range(steps) for band in ([None] if step in self.exact else order(step, bands))
        ]

    def seconds(self, steps: int, bands: int) -> float:
        return simulate(self.micro_steps(steps, bands), bands, by_share(STAGES, bands))[-1]


def variants(steps: int) -> list[Variant]:
    """The product's own first. Without an exact first step only the order down reads nothing that was never written."""
    middle, last = steps // 2, steps - 1
    placements = [(0,), (), (middle,), (0, 1), (0, middle), (0, last), (0, 1, 2)]
    return [*map(Variant, placements), *(Variant((0,), order) for order in ORDERS if order != "down")]


@torch.inference_mode()
def run(
    model: RemoteTransformer, noise: torch.Tensor, sigmas: torch.Tensor, prompt: Prompt, bands: int, variant: Variant
) -> torch.Tensor:
    """The sample from `noise` [B, C, H, W], by Euler."""
    patching, shape = model.built.patching, (2 * len(noise), *noise.shape[1:])
    text = model.built.text_tokens(0, prompt.positive)
    rows = cut_rows(tuple(noise.shape), bands, patching, text)
    conditioning = conditioning_of(model, patching.grid(shape), prompt.tensors())
    whole = conditioning.token_order.span
    number, steps = model.open_run(), len(sigmas) - 1
    x = noise.clone()
    for step in range(steps):
        timestep = sigmas[step].repeat(2 * len(x))
        todo: Sequence[tuple[Span, Span]]
        if step in variant.exact:
            todo = [(Span(0, shape[patching.band_dim]), whole)]
        else:
            patch = patching.band_size
            order = [rows[band] for band in ORDERS[variant.order](step, len(rows))]
            todo = [
                (span, conditioning.token_order.of_rows(Span(span.start // patch, span.stop // patch))) for span in order
            ]
        posted = []
        for place, (span, tokens) in enumerate(todo):
            own = patching.rows(x, span)
            call = PostedCall(
                patching.pack(torch.cat((own, own))), timestep, conditioning, tokens, with_text=place == 0, run=number
            )
            model.post(call)
            posted.append((span, call))
        for span, call in posted:
            own = patching.rows(x, span)
            velocity = patching.unpack(wait_for(call.future, lambda: None), (2 * len(own), *own.shape[1:]))
            negative, positive = velocity.chunk(2)
            velocity = negative + prompt.cfg * (positive - negative)
            own += (sigmas[step + 1] - sigmas[step]) * velocity
    model.close_run(number, lambda: None)
    return x


def pictures(
    model: RemoteTransformer,
    symbols: torch.Tensor,
    noise: torch.Tensor,
    steps: int,
    bands: int,
    cfg: float,
    variant: Variant,
) -> torch.Tensor:
    """[N, 256, 256], as mini.sample gives them."""
    sigmas = linear_sigmas(steps)
    parts = zip(symbols.split(CHUNK), noise.split(CHUNK), strict=True)
    latents = [run(model, x, sigmas, mini.prompts_of(own, cfg), bands, variant) for own, x in parts]
    return mini.pictures(torch.cat(latents))


def main() -> None:
    parser = mini.parser(__doc__, 40)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20, 8, 28])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    symbols, noise = mini.requests(options.images)
    model = load(Degrees(batch=2))
    report = mini.Report(options, predicted_time="in exact steps of one rank: two even stages, no transfers")
    for steps in options.steps:
        reference = sample(model, symbols, noise, steps, 0, options.cfg)
        for bands in options.bands:
            product = sample(model, symbols[:CHUNK], noise[:CHUNK], steps, bands, options.cfg)
            for variant in variants(steps):
                images = pictures(model, symbols, noise, steps, bands, options.cfg, variant)
                if variant == Variant((0,)):
                    assert torch.equal(images[:CHUNK], product), "this is not what the product computes"
                how = {"exact_steps": variant.exact, "order": variant.order}
                seconds = round(variant.seconds(steps, bands), 3)
                row = {"steps": steps, "bands": bands, **how, "predicted_time": seconds}
                report(row | judge(images, reference, symbols))
    model.pool.close()


if __name__ == "__main__":
    main()
