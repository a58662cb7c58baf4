"""Files that families compute, by ComfyUI's own class on ranks in their place. Run by serve.py."""

import sys
from functools import partial
from unittest.mock import patch

from boot import BASE, Results, comfy, difference, node, nodes, parallel, parts_of, sequence, torch
from families import detecting, read, sample

MODES = {
    "stages": {"pipe": 2},
    "split batch": {"pipe": 1, "batch": 2},
    "tensor": {"pipe": 1, "tensor": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "ring": {"pipe": 1, "config": sequence(ring=2)},
    "tensor and ring": {"pipe": 1, "tensor": 2, "devices": "cpu,cpu,cpu,cpu", "config": sequence(ring=2)},
}
LOADER = sys.modules[nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__]


def no_family(path, _conversion):
    raise LOADER.UnknownModel(f"model_name: {path.name} is taken by no family")


def by_own_class(load, *arguments, **named):
    """What `load` gives for a file by ComfyUI's own class, as if no family took the file."""
    with patch.object(LOADER, "open_checkpoint", no_family):
        return load(*arguments, **named)


def pipefusion(file: str, warmup_steps: int):
    return node("ApplyPipeFusion", parallel(file), 2, warmup_steps, True)


def displaced(file: str, warmup_steps: int):
    """Even patches: on a busy machine a family would cut them by the ranks' speeds, which its trial runs measure."""
    config = sequence(patch_mode="displaced", patch=2, patch_warmup_steps=warmup_steps)
    return parallel(file, pipe=1, config=config, stage_split="even")


def main(results: Results, names: list[str]) -> None:
    for name in names:
        with detecting(read(name)[-1]["detected"]):
            path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
            native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
            expected = sample(native, name)

            def shares(model, expected, name=name) -> dict:
                """Of a nested latent the largest of the parts' shares."""
                pairs = zip(parts_of(expected), parts_of(sample(model, name)), strict=True)
                return {"share": max(difference(part, own) / float(part.abs().max()) for part, own in pairs)}

            def compare(mode: str, name=name, expected=expected, shares=shares) -> dict:
                return shares(by_own_class(parallel, f"{name}.safetensors", **MODES[mode]), expected)

            def in_patches(load, warmup_steps: int, name=name, expected=expected, shares=shares) -> dict:
                """Beside the native model if all steps are exact, and beside the family if one is."""
                file = f"{name}.safetensors"
                if warmup_steps == 1:
                    expected = sample(load(file, warmup_steps), name)
                return shares(by_own_class(load, file, warmup_steps), expected)

            for mode in MODES:
                results.case(f"{name}, {mode}", partial(compare, mode))
            for kind, load in {"PipeFusion": pipefusion, "displaced patches": displaced}.items():
                results.case(f"{name}, {kind}, all steps exact", partial(in_patches, load, 1000))
                results.case(f"{name}, {kind} beside the family", partial(in_patches, load, 1))
