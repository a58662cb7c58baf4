"""Every family with ScaleROPE, inside another node's wrapper: MODEL and what the wrapper sees, against ComfyUI's own.

The test process has put the cases where families.py finds them. Run by serve.py.
"""

from functools import partial
from typing import Any

from block_patches import extra, load_extras
from boot import BASE, Results, comfy, difference, parallel, torch
from families import detecting, read, sample

SCALED = {"scale_x": 1.7, "shift_x": 2.5, "scale_y": 0.6, "shift_y": -1.0, "scale_t": 1.3, "shift_t": 0.5}


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ["tensor", *value.shape]
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return sorted(value) if isinstance(value, dict) and "sigmas" not in value else type(value).__name__


def seen(model: Any, name: str) -> tuple[torch.Tensor, list]:
    """Samples, and what the wrapper was given at the first call: arguments in their order, then those by name."""
    calls = []

    def wrapper(executor, *arguments, **named):
        given = {key: described(value) for key, value in named.items() if value is not None}
        calls.append([[described(value) for value in arguments], given])
        return executor(*arguments, **named)

    model = extra("ScaleROPE", model, **SCALED)
    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "seen", wrapper)
    return sample(model, name), calls[:1]


def compare(name: str) -> dict[str, Any]:
    path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
    native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
    ours = parallel(path.name, pipe=1, devices="cpu")
    plain, (expected, native_saw), (found, saw) = sample(native, name), seen(native, name), seen(ours, name)
    return {
        "moved": difference(plain, expected),
        "difference": difference(expected, found),
        "native saw": native_saw,
        "saw": saw,
    }


def main(results: Results, names: list[str]) -> None:
    load_extras("nodes_rope")
    for name in names:
        with detecting(read(name)[-1]["detected"]):
            results.case(name, partial(compare, name))
