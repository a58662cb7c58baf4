"""Files in ComfyUI's quantised formats: our MODEL and ComfyUI's own against the plain file's. Run by serve.py."""

from collections.abc import Callable
from functools import partial

from boot import Results, ksampler, native_model, parallel, random_prompts, sequence, torch

MODES = {
    "one rank": partial(parallel, pipe=1, devices="cpu"),
    "pipe 2": parallel,
    "ulysses 2": lambda file: parallel(file, pipe=1, config=sequence(ulysses=2)),
    "tensor 2": partial(parallel, pipe=1, tensor=2),
}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main(results: Results, plain: str, files: dict[str, str], wanted: dict[str, list[str]]) -> None:
    """`plain`: the file. `files`: format -> the quantised file. `wanted`: mode -> some of these."""
    (text,) = random_prompts(9)

    def sample(model) -> torch.Tensor:
        return ksampler(model, (text, text), torch.zeros(1, 16, 16, 12), steps=2, cfg=1.0)

    with torch.inference_mode():
        exact = sample(native_model(plain))
    expected = {}

    def alone(case: str) -> dict[str, float]:
        expected[case] = sample(native_model(files[case]))
        return {"from plain": distance(expected[case], exact)}

    def compare(case: str, make: Callable) -> dict[str, float]:
        found = sample(make(files[case]))
        return {"from plain": distance(found, exact), "from native": distance(found, expected[case])}

    for case in files:
        results.case(f"{case}, native", partial(alone, case))
    for mode, cases in wanted.items():
        for case in cases:
            results.case(f"{case}, {mode}", partial(compare, case, MODES[mode]))
