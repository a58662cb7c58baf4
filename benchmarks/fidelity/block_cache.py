"""What a cache of blocks would gain on the trained mini models, beside the step cache and fewer steps. A simulation.

    python -m benchmarks.fidelity.block_cache --images 40 --out benchmarks/results/block_cache_mini_40_NAME_DATE.json

A cached block adds what it added when it last ran (`reuse`), or the line through the last two of those at the new time
(`line`). Which blocks run is decided in one of two ways. `each block`: the block's own input has changed by less than the
threshold, relative to the input with which it last ran (raylight's block cache for MiniMax H3). `first block`: the first
block runs, and what it adds has changed by less than the threshold; then no other block runs (ParaAttention's First Block
Cache). The first step and the last one run whole, as in the step cache.

One process computes whole calls: on ranks every block would have the same input. For each setting: the share of blocks that
run, which is the share of a step's time on a large model, and the PSNR to the run without a cache of the same steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.harness import mini_model, mini_video
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.sampling import Prompt, digit_prompts, euler, linear_sigmas, may_forecast
from parallel_backend.client.step_cache import Forecast, StepCache
from parallel_backend.quickstart.model import WEIGHTS
from testing import tiny

RULES, FILLS = ("each block", "first block"), ("reuse", "line")
Streams = tuple[torch.Tensor, ...]
Model = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""(latents, timestep [B], conditioning tensors) -> velocity."""


@dataclass
class Known:
    """What a cache knows of one block."""

    given: torch.Tensor | None = None
    """Its image input when it last ran."""
    added: list[tuple[float, Streams]] = field(default_factory=list)
    """At its last two times: what it added to its streams."""

    def filled(self, time: float, line: bool) -> Streams:
        last_time, last = self.added[-1]
        if not line or len(self.added) < 2:
            return last
        before_time, before = self.added[0]
        ratio = (time - last_time) / (last_time - before_time)
        return tuple(new + ratio * (new - old) for new, old in zip(last, before, strict=True))


class BlockCache:
    """Stands in front of the blocks of a model."""

    def __init__(self, blocks: list[torch.nn.Module], streams: list[tuple[str, ...]]):
        """`streams`: of each block, its arguments that it returns, in its order; the image's is called hidden_states."""
        self._blocks = [(block.forward, names) for block, names in zip(blocks, streams, strict=True)]
        for number, block in enumerate(blocks):
            block.forward = partial(self._call, number)
        self.begin("each block", False, 0.0)

    def begin(self, rule: str, line: bool, threshold: float) -> None:
        """A sampling run. With a threshold of 0 all blocks run."""
        self.rule, self.line, self.threshold = rule, line, threshold
        self._known = [Known() for _ in self._blocks]
        self.ran, self.calls, self.time, self.allowed, self._skip = 0, 0, 0.0, False, False

    def _call(self, number: int, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor | Streams:
        forward, names = self._blocks[number]
        known, self.calls = self._known[number], self.calls + 1
        named |= dict(zip(("hidden_states", "encoder_hidden_states"), arguments, strict=False))
        more = arguments[2:]
        given = tuple(named[name] for name in names)
        image = named["hidden_states"]
        if self._may_skip(number, known, image):
            out = tuple(x + added for x, added in zip(given, known.filled(self.time, self.line), strict=True))
            return out if len(out) > 1 else out[0]
        self.ran += 1
        first = [named.pop(name) for name in ("hidden_states", "encoder_hidden_states") if name in named]
        out = forward(*first, *more, **named)
        outs = out if isinstance(out, tuple) else (out,)
        added = tuple(new - old for new, old in zip(outs, given, strict=True))
        if number == 0 and known.added:
            of_image = names.index("hidden_states")
            self._skip = self.allowed and _change(added[of_image], known.added[-1][1][of_image]) < self.threshold
        known.given, known.added = image, [*known.added[-1:], (self.time, added)]
        return out

    def _may_skip(self, number: int, known: Known, image: torch.Tensor) -> bool:
        if not (self.allowed and known.added):
            return False
        if self.rule == "first block":
            return number > 0 and self._skip
        return _change(image, known.given) < self.threshold


def _change(new: torch.Tensor, old: torch.Tensor | None) -> float:
    assert old is not None
    return float((new - old).norm() / old.norm())


@dataclass(frozen=True)
class Subject:
    """A mini model and what is asked of it."""

    name: str
    model: Model
    cache: BlockCache
    noise: torch.Tensor
    asked: torch.Tensor
    prompts: Callable[[torch.Tensor, float], Prompt]
    decode: Callable[[torch.Tensor], torch.Tensor]
    start: float

    def sampled(self, steps: int, cfg: float, run: Callable) -> tuple[torch.Tensor, float]:
        """Pictures, and the share of blocks that ran. `run`: (noise, sigmas, prompt) -> (latents, share)."""
        found, shares = [], []
        for noise, asked in zip(self.noise.split(mini_model.CHUNK), self.asked.split(mini_model.CHUNK), strict=True):
            latents, share = run(noise, self.start * linear_sigmas(steps), self.prompts(asked, cfg))
            found.append(latents)
            shares.append(share)
        return self.decode(torch.cat(found)), sum(shares) / len(shares)

    def in_blocks(
        self, rule: str, line: bool, threshold: float, noise: torch.Tensor, sigmas: torch.Tensor, prompt: Prompt
    ) -> tuple[torch.Tensor, float]:
        """As `run` of `sampled`, with a cache of blocks."""
        self.cache.begin(rule, line, threshold)

        def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            self.cache.time, self.cache.allowed = float(timestep[0]), may_forecast(timestep, sigmas)
            return self.model(x, prompt.timestep * timestep, tensors)

        latents = euler(predict, noise, sigmas, prompt)
        return latents, self.cache.ran / self.cache.calls

    def in_steps(
        self, threshold: float, noise: torch.Tensor, sigmas: torch.Tensor, prompt: Prompt
    ) -> tuple[torch.Tensor, float]:
        """As `run` of `sampled`, with the step cache."""
        self.cache.begin("each block", False, 0.0)
        cache = StepCache(threshold)

        def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            decided = cache.call(0, float(timestep[0]), may_forecast(timestep, sigmas))
            if isinstance(decided, Forecast):
                return decided.output()[0]
            decided.outputs[0] = (self.model(x, prompt.timestep * timestep, tensors),)
            return decided.outputs[0][0]

        latents = euler(predict, noise, sigmas, prompt)
        return latents, cache.computed / (cache.computed + cache.forecast)


def subjects(images: int, videos: int) -> list[Subject]:
    pictures = tiny.published_model(WEIGHTS)
    lists = {spec.name: spec for spec in open_checkpoint(WEIGHTS).family.blocks.lists}
    names = {"text": "encoder_hidden_states", "image": "hidden_states"}

    def cache_of(model: torch.nn.Module, lists: dict) -> BlockCache:
        blocks = [
            (block, tuple(names[each] for each in lists[name].returns)) for name in lists for block in getattr(model, name)
        ]
        return BlockCache([block for block, _ in blocks], [streams for _, streams in blocks])

    symbols, noise = mini_model.requests(images)
    found = [
        Subject(
            "pictures",
            partial(tiny.reference, pictures),
            cache_of(pictures, lists),
            noise,
            symbols,
            digit_prompts,
            mini_model.pictures,
            1.0,
        )
    ]
    film = tiny.published_model(mini_video.WEIGHTS)
    lists = {spec.name: spec for spec in open_checkpoint(mini_video.WEIGHTS).family.blocks.lists}
    asked, noise = mini_video.requests(videos)

    def forward(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return film(x, timestep, tensors["context"], return_dict=False)[0]

    found.append(
        Subject(
            "videos",
            forward,
            cache_of(film, lists),
            noise,
            asked,
            mini_video.prompts_of,
            mini_video.moving_digits.decode,
            mini_video.START,
        )
    )
    return found


@torch.inference_mode()
def main() -> None:
    parser = mini_model.parser(__doc__, 40)
    parser.add_argument("--videos", type=int, default=12)
    parser.add_argument("--steps", type=mini_model.numbers(int), default=[20, 8, 4])
    parser.add_argument("--thresholds", type=mini_model.numbers(float), default=[0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
    parser.add_argument("--step-thresholds", type=mini_model.numbers(float), default=[0.01, 0.02, 0.04, 0.08])
    options = parser.parse_args()
    report = mini_model.Report(options, videos=str(options.videos))
    for subject in subjects(options.images, options.videos):
        for steps in options.steps:
            exact, _ = subject.sampled(steps, options.cfg, partial(subject.in_blocks, "each block", False, 0.0))

            def note(mode: str, count: int, run: Callable, subject=subject, steps=steps, exact=exact) -> None:
                images, share = subject.sampled(count, options.cfg, run)
                share *= count / steps
                report(
                    {
                        "of": subject.name,
                        "steps": steps,
                        "mode": mode,
                        "share": round(share, 3),
                        **mini_model.closeness(images, exact),
                    }
                )

            whole = partial(subject.in_blocks, "each block", False, 0.0)
            for fewer in sorted({max(2, round(steps * share)) for share in (0.45, 0.55, 0.65, 0.75, 0.85, 0.95)}):
                if fewer < steps:
                    note(f"{fewer} steps instead", fewer, whole)
            for threshold in options.step_thresholds:
                note(f"step cache {threshold:g}", steps, partial(subject.in_steps, threshold))
            for rule in RULES:
                for fill in FILLS:
                    for threshold in options.thresholds:
                        note(
                            f"{rule}, {fill}, {threshold:g}",
                            steps,
                            partial(subject.in_blocks, rule, fill == "line", threshold),
                        )


if __name__ == "__main__":
    main()
