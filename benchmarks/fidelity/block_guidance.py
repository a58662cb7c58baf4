"""How close PipeFusion comes with guidance inside the blocks (skip layer guidance, normalized attention guidance), on the
trained mini model, beside fewer steps.

    python -m benchmarks.fidelity.block_guidance --images 40 --out benchmarks/results/block_guidance_mini_40_NAME_DATE.json

For each number of steps: PSNR (decoded pictures in 0..1, mean over pictures) to the whole run with the same guidance, which
is exact, of PipeFusion in so many patches (one warm-up step), and of whole runs with fewer steps. `effect_psnr_db`: of the
run without it, the further the more the guidance does. Skip layer guidance is on in the first half of the noise levels, so
that its calls begin, and end, within a run.
"""

from collections.abc import Callable

import torch

from benchmarks.harness import mini_model as mini
from benchmarks.harness.mini_model import CHUNK, closeness, judge, load, pictures
from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, digit_prompts, euler, linear_sigmas
from parallel_backend.core.block_changes import UNCHANGED, BlockChanges, NormalizedGuidance
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span

SKIPPED = BlockChanges(("single_transformer_blocks.2",))
SCALE = 3.0
"""Of skip layer guidance: the default of ComfyUI's nodes, as those of normalized attention guidance below."""
UNTIL = 0.5
"""Noise level down to which blocks are skipped."""

Ask = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], BlockChanges], torch.Tensor]
"""Latent, timestep, conditioning and changes of a model call -> its output."""


def plain(ask: Ask, x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor], cfg: float) -> torch.Tensor:
    """The outputs of both prompts, [uncond, cond]."""
    return ask(x, timestep, tensors, UNCHANGED)


def skip_layers(ask: Ask, x: torch.Tensor, timestep: torch.Tensor, tensors: dict, cfg: float) -> torch.Tensor:
    """As `plain`. What skipping adds to the guided output is in cond's."""
    both, count = ask(x, timestep, tensors, UNCHANGED), len(x) // 2
    if float(timestep[0]) < UNTIL:
        return both
    cond = {name: tensor[count:] for name, tensor in tensors.items()}
    negative, positive = both.split(count)
    skipped = ask(x[count:], timestep[count:], cond, SKIPPED)
    return torch.cat((negative, positive + SCALE / cfg * (positive - skipped)))


def normalized(ask: Ask, x: torch.Tensor, timestep: torch.Tensor, tensors: dict, cfg: float) -> torch.Tensor:
    """As `plain`."""
    count = len(x) // 2
    spans = {"positive": Span(count, 2 * count), "negative": Span(0, count)}
    return ask(x, timestep, tensors, BlockChanges(guidance=NormalizedGuidance(5.0, 1.5, 0.5, **spans)))


METHODS = {"skip layer guidance": skip_layers, "normalized attention guidance": normalized}


def nothing() -> None:
    """There is no Cancel here."""


def sample(
    model: RemoteTransformer, noise: torch.Tensor, steps: int, prompt: Prompt, bands: int, method: Callable
) -> torch.Tensor:
    """Latents like `noise` [B, C, H, W]. `bands` 0: whole calls."""
    sigmas = linear_sigmas(steps)

    def guided(ask: Ask):
        return lambda x, timestep, tensors: method(ask, x, timestep, tensors, prompt.cfg)

    if not bands:
        return euler(
            guided(lambda *given: model.predict(ModelCall(*given[:3], changes=given[3]), nothing)), noise, sigmas, prompt
        )
    shape, family = tuple(noise.shape), model.family
    rows = cut_rows(shape, bands, family.patching, family.text_tokens(family.patching.grid(shape), 0, prompt.positive))
    run, limit = BandedRun(model, rows, tuple(noise.shape), warm_up=True), exact_above(sigmas, 1)

    def sample_band(band: int) -> torch.Tensor:
        def ask(x, timestep, tensors, changes):
            return run.predict(band, ModelCall(x, timestep, tensors, changes=changes), float(timestep[0]) > limit)

        return euler(guided(ask), noise[:, :, rows[band].slice], sigmas, prompt)

    parts = run_bands(run, sample_band, nothing, nothing)
    model.close_run(run.run, nothing)
    return torch.cat(parts, dim=2)


def main() -> None:
    parser = mini.parser(__doc__, 40)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20, 8])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    symbols, noise = mini.requests(options.images)
    report = mini.Report(options)
    model = load(Degrees(pipe=2))

    def images(steps: int, bands: int, method: Callable) -> torch.Tensor:
        parts = zip(symbols.split(CHUNK), noise.split(CHUNK), strict=True)
        latents = [sample(model, x, steps, digit_prompts(part, options.cfg), bands, method) for part, x in parts]
        return pictures(torch.cat(latents))

    for name, method in METHODS.items():
        for steps in options.steps:
            exact = images(steps, 0, method)
            effect = closeness(images(steps, 0, plain), exact)
            row = {"guidance": name, "steps": steps}
            report(row | {"mode": "whole", **judge(exact, exact, symbols), "effect_psnr_db": effect["psnr_db"]})
            for bands in options.bands:
                report(row | {"mode": f"pipefusion M={bands}", **judge(images(steps, bands, method), exact, symbols)})
            for fewer in (steps // 2, steps // 2 + 1):
                report(row | {"mode": f"whole, {fewer} steps", **judge(images(fewer, 0, method), exact, symbols)})
    model.pool.close()


if __name__ == "__main__":
    main()
