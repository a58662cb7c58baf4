"""Files that families compute, by ComfyUI's own class on ranks in their place. Run by serve.py."""

import sys
from functools import partial
from unittest.mock import patch

from boot import BASE, Results, comfy, difference, nodes, parallel, parts_of, sequence, torch
from families import detecting, read, sample

MODES = {
    "stages": {"pipe": 2},
    "split batch": {"pipe": 1, "batch": 2},
    "tensor": {"pipe": 1, "tensor": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "ring": {"pipe": 1, "config": sequence(ring=2)},
}
LOADER = sys.modules[nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__]


def no_family(path, _conversion):
    raise LOADER.UnknownModel(f"model_name: {path.name} is taken by no family")


def by_own_class(mode: str, file: str):
    """The MODEL of a file by ComfyUI's own class in one of MODES, as if no family took the file."""
    with patch.object(LOADER, "open_checkpoint", no_family):
        return parallel(file, **MODES[mode])


def main(results: Results, names: list[str]) -> None:
    for name in names:
        with detecting(read(name)[-1]["detected"]):
            path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
            native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
            expected = sample(native, name)

            def compare(mode: str, name=name, expected=expected) -> dict:
                """Of a nested latent the largest of the parts' shares."""
                found = parts_of(sample(by_own_class(mode, f"{name}.safetensors"), name))
                pairs = zip(parts_of(expected), found, strict=True)
                return {"share": max(difference(part, own) / float(part.abs().max()) for part, own in pairs)}

            for mode in MODES:
                results.case(f"{name}, {mode}", partial(compare, mode))
