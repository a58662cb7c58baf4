"""Steps in parallel (ParaStep, arXiv 2505.14741) on a trained mini model, simulated on one rank: no mode of the product.

    python -m benchmarks.fidelity.steps_in_parallel --model pictures --images 40 --out benchmarks/results/X.json

After `--warm-up` exact steps, R replicas take the next R steps at once, in rounds. The first has its true input; each of the
others has one that the sampler was moved on to with predicted outputs: the last computed output (`reuse`, as in the paper),
or the line or the parabola through the last two or three. Then the sampler makes the R steps with the outputs that were
computed. A run of S steps takes the time of W + (S - W) / R steps (rounded up), in which the controls are:

- one rank with so many steps,
- one rank that computes the first step of each round and goes on along the line: a step cache of fixed interval,
- PipeFusion with R patches, with one warm-up step and with W (Euler only; `step_times` is what is predicted for R stages).

Each row has the PSNR (decoded, in 0..1, mean over pictures or videos) to the exact run of the same sampler and steps. At
cfg 1, where there are no two prompts to split between replicas.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch

from benchmarks.harness import mini_model, mini_video, moving_digits
from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.pipeline_model import StageCost, finish_times

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [B, C, ...], its sigma) -> the model's output like x."""
Earlier = tuple[torch.Tensor, torch.Tensor] | None
"""What a sampler keeps from the step before: its sigma and its denoised latent."""
Advance = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Earlier], tuple[torch.Tensor, Earlier]]
"""(x, its sigma, the next sigma, velocity, kept) -> x at the next sigma, and what to keep."""

PREDICTORS = {"reuse": 0, "line": 1, "parabola": 2}
"""Degree of the polynomial through the last computed outputs."""


def euler(x: torch.Tensor, sigma: torch.Tensor, following: torch.Tensor, velocity: torch.Tensor, earlier: Earlier):
    return x + (following - sigma) * velocity, None


def dpmpp_2m(x: torch.Tensor, sigma: torch.Tensor, following: torch.Tensor, velocity: torch.Tensor, earlier: Earlier):
    """DPM-Solver++(2M), arXiv 2211.01095, in the time -log(sigma), as ComfyUI has it."""
    denoised = aim = x - sigma * velocity
    if earlier is not None and following > 0:
        sigma_before, denoised_before = earlier
        ratio = (sigma_before / sigma).log() / (sigma / following).log()
        aim = denoised + (denoised - denoised_before) / (2 * ratio)
    return aim + following / sigma * (x - aim), (sigma, denoised)


SAMPLERS: dict[str, Advance] = {"euler": euler, "dpmpp_2m": dpmpp_2m}


def extrapolated(known: list[tuple[torch.Tensor, torch.Tensor]], sigma: torch.Tensor, degree: int) -> torch.Tensor:
    """At `sigma` the polynomial through the last `degree` + 1 of `known` (sigma, output), or all where they are fewer."""
    nodes = known[-degree - 1 :]
    total = torch.zeros_like(nodes[0][1])
    for at, output in nodes:
        weight = torch.ones(())
        for other, _ in nodes:
            if other is not at:
                weight = weight * (sigma - other) / (at - other)
        total = total + weight * output
    return total


def step_times(steps: int, replicas: int, warm_up: int) -> int:
    """Time of a run whose steps after the warm-up are made in rounds of `replicas`, in steps of one rank."""
    return warm_up + -(-(steps - warm_up) // replicas)


def sample(
    velocity: Velocity,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    advance: Advance,
    replicas: int = 1,
    warm_up: int = 0,
    degree: int = 0,
    forecast: bool = False,
) -> torch.Tensor:
    """x at sigmas[0] -> the sample. One replica is the exact run.

    `forecast`: only the first step of a round is computed, and the others' outputs are predicted after it, not before.
    """
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    todo, earlier = list(pairwise(sigmas)), None
    while todo:
        count = 1 if len(known) < warm_up else replicas
        turn, todo = todo[:count], todo[count:]
        if forecast:
            known.append((turn[0][0], velocity(x, turn[0][0])))
            outputs = [known[-1][1], *(extrapolated(known, sigma, degree) for sigma, _ in turn[1:])]
        else:
            inputs, kept = [x], earlier
            for sigma, following in turn[:-1]:
                ahead, kept = advance(inputs[-1], sigma, following, extrapolated(known, sigma, degree), kept)
                inputs.append(ahead)
            outputs = [velocity(each, sigma) for each, (sigma, _) in zip(inputs, turn, strict=True)]
            known.extend((sigma, output) for (sigma, _), output in zip(turn, outputs, strict=True))
        for (sigma, following), output in zip(turn, outputs, strict=True):
            x, earlier = advance(x, sigma, following, output, earlier)
    return x


@dataclass(frozen=True)
class Subject:
    """A mini model, how it is asked and how its samples are judged."""

    harness: ModuleType  # has load, requests, judge
    prompt_of: Callable[[torch.Tensor, float], Prompt]
    decode: Callable[[torch.Tensor], torch.Tensor]
    start: float  # noise level of what is denoised
    along: str  # the axis that PipeFusion's patches cut


SUBJECTS = {
    "pictures": Subject(mini_model, mini_model.prompts_of, mini_model.pictures, 1.0, "rows"),
    "video": Subject(mini_video, mini_video.prompts_of, moving_digits.decode, mini_video.START, "frames"),
}


class Bench:
    """One mini model on a rank, what is asked of it, and the report."""

    def __init__(self, options):
        self.options, self.subject = options, SUBJECTS[options.model]
        self.model = self.subject.harness.load(Degrees())
        self.prompts, self.noise = self.subject.harness.requests(options.images)
        about = {"simulated": "one rank of 1 thread makes all steps", "images_are": options.model}
        self.report = mini_model.Report(options, **about, warm_up=options.warm_up)

    def sample(self, steps: int, sampler: str, **given) -> torch.Tensor:
        """Decoded samples."""
        latents = []
        for prompts, x in zip(self.prompts.split(mini_model.CHUNK), self.noise.split(mini_model.CHUNK), strict=True):
            prompt = self.subject.prompt_of(prompts, 1.0)

            def velocity(x: torch.Tensor, sigma: torch.Tensor, prompt=prompt) -> torch.Tensor:
                return self.model.predict(
                    ModelCall(x, prompt.timestep * sigma.repeat(len(x)), prompt.tensors()), lambda: None
                )

            latents.append(sample(velocity, x, self.subject.start * linear_sigmas(steps), SAMPLERS[sampler], **given))
        return self.subject.decode(torch.cat(latents))

    def pipefusion(self, steps: int, patches: int, warm_up: int) -> torch.Tensor:
        given = self.model, self.prompts, self.noise, steps, patches, 1.0
        how = {"prompt_of": self.subject.prompt_of, "along": self.subject.along, "start": self.subject.start}
        return self.subject.decode(mini_model.sample_latents(*given, **how, warm_up=warm_up)[0])

    def run(self, steps: int, sampler: str) -> None:
        exact, warm_up = self.sample(steps, sampler), self.options.warm_up

        def row(replicas: int, mode: str, time: float, samples: torch.Tensor) -> None:
            about = {"steps": steps, "sampler": sampler, "replicas": replicas, "mode": mode, "step_times": round(time, 2)}
            self.report(about | self.subject.harness.judge(samples, exact, self.prompts))

        row(1, "exact", steps, exact)
        for replicas in self.options.replicas:
            time, rounds = step_times(steps, replicas, warm_up), {"replicas": replicas, "warm_up": warm_up}
            row(1, f"{time} steps instead", time, self.sample(time, sampler))
            row(1, f"forecast in rounds of {replicas}", time, self.sample(steps, sampler, **rounds, degree=1, forecast=True))
            for name, degree in PREDICTORS.items():
                row(replicas, f"in parallel, {name}", time, self.sample(steps, sampler, **rounds, degree=degree))
            if sampler == "euler":
                stages = [StageCost(0.0, 1 / replicas)] * replicas
                for first in sorted({1, warm_up}):
                    piped = finish_times([True] * first + [False] * (steps - first), replicas, stages)[-1]
                    mode = f"pipefusion M={replicas}, warm-up {first}"
                    row(replicas, mode, piped, self.pipefusion(steps, replicas, first))


def main() -> None:
    parser = mini_model.parser(__doc__, 40)
    parser.set_defaults(cfg=1.0)
    parser.add_argument("--model", choices=SUBJECTS, default="pictures")
    parser.add_argument("--steps", type=mini_model.numbers(int), default=[8, 20, 50])
    parser.add_argument("--samplers", type=mini_model.numbers(str), default=list(SAMPLERS))
    parser.add_argument("--replicas", type=mini_model.numbers(int), default=[2, 4])
    parser.add_argument("--warm-up", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options)
    for steps in options.steps:
        for sampler in options.samplers:
            bench.run(steps, sampler)
    bench.model.pool.close()


if __name__ == "__main__":
    main()
