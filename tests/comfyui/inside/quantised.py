"""Files in ComfyUI's quantised formats: our MODEL and ComfyUI's own against the plain file's. Run by serve.py."""

from functools import partial

from boot import Results, ksampler, native_model, parallel, random_prompts, torch


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main(results: Results, plain: str, files: dict[str, str]) -> None:
    """`plain`: the file. `files`: format -> the quantised file."""
    (text,) = random_prompts(9)

    def sample(model) -> torch.Tensor:
        return ksampler(model, (text, text), torch.zeros(1, 16, 16, 12), steps=2, cfg=1.0)

    with torch.inference_mode():
        exact = sample(native_model(plain))

    def compare(file: str) -> dict[str, float]:
        native, ours = sample(native_model(file)), sample(parallel(file, pipe=1, tensor=2))
        return {
            "native from plain": distance(native, exact),
            "ours from plain": distance(ours, exact),
            "ours from native": distance(ours, native),
        }

    for kind, file in files.items():
        results.case(kind, partial(compare, file))
