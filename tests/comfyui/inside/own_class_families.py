"""Files that families compute, by ComfyUI's own class on ranks in their place. Run by serve.py."""

import sys
from functools import partial
from unittest.mock import patch

from boot import BASE, Results, comfy, difference, nodes, parallel, parts_of, sequence, torch
from families import detecting, read, sample

MODES = {
    "stages": {"pipe": 2},
    "split batch": {"pipe": 1, "batch": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "ring": {"pipe": 1, "config": sequence(ring=2)},
}
LOADER = sys.modules[nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__]


def no_family(path, _conversion):
    raise LOADER.UnknownModel(f"model_name: {path.name} is taken by no family")


def main(results: Results, names: list[str]) -> None:
    for name in names:
        with detecting(read(name)[-1]["detected"]):
            path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
            native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
            expected = sample(native, name)

            def compare(degrees: dict, name=name, expected=expected) -> dict:
                with patch.object(LOADER, "open_checkpoint", no_family):
                    model = parallel(f"{name}.safetensors", **degrees)
                largest = max(float(part.abs().max()) for part in parts_of(expected))
                return {"share": difference(expected, sample(model, name)) / largest}

            for mode, degrees in MODES.items():
                results.case(f"{name}, {mode}", partial(compare, degrees))
