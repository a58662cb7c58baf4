"""Files in ComfyUI's quantised formats: our MODEL and ComfyUI's own against the plain file's. Run by serve.py."""

from collections.abc import Callable
from functools import partial

from boot import BASE, Results, comfy, ksampler, other_attention, parallel, sequence, torch

MODES = {
    "one rank": partial(parallel, pipe=1, devices="cpu"),
    "pipe 2": parallel,
    "ulysses 2": lambda file: parallel(file, pipe=1, config=sequence(ulysses=2)),
    "tensor 2": partial(parallel, pipe=1, tensor=2),
}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main(results: Results, plain: dict[str, str], files: dict[str, str], wanted: dict[str, list[str]]) -> None:
    """`plain`: family -> its file. `files`: "family, format" -> the quantised file. `wanted`: mode -> some of these."""
    g = torch.Generator().manual_seed(0)
    text = [[torch.randn(1, 9, 64, generator=g), {"pooled_output": torch.randn(1, 32, generator=g)}]]

    def native(file: str):
        path = str(BASE / "models" / "diffusion_models" / file)
        return comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32})

    def sample(model) -> torch.Tensor:
        return ksampler(model, (text, text), torch.zeros(1, 16, 16, 12), steps=2, cfg=1.0)

    with torch.inference_mode():
        exact = {family: sample(native(file)) for family, file in plain.items()}
    expected = {}

    def alone(case: str) -> dict[str, float]:
        model, reference = native(files[case]), exact[case.partition(",")[0]]
        expected[case] = sample(model)
        other = distance(sample(other_attention(model)), expected[case])
        return {"from plain": distance(expected[case], reference), "from itself": other}

    def compare(case: str, make: Callable) -> dict[str, float]:
        found = sample(make(files[case]))
        reference = exact[case.partition(",")[0]]
        return {"from plain": distance(found, reference), "from native": distance(found, expected[case])}

    for case in files:
        results.case(f"{case}, native", partial(alone, case))
    for mode, cases in wanted.items():
        for case in cases:
            results.case(f"{case}, {mode}", partial(compare, case, MODES[mode]))
