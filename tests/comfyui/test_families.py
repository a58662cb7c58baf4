"""Every family that ComfyUI can build small: Parallel DiT Loader's MODEL gives what ComfyUI's own gives, by KSampler."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from testing.cases import all_cases
from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui

CASES = [case for case in all_cases() if case.native is not None]


def described(value, tensors: dict[str, torch.Tensor]):
    """A value as JSON, its tensors added to `tensors`. See inside/families.py."""
    if isinstance(value, torch.Tensor):
        tensors[name := f"part {len(tensors)}"] = value
        return {"tensor": name}
    if isinstance(value, list):
        return [described(item, tensors) for item in value]
    return {key: described(item, tensors) for key, item in value.items()} if isinstance(value, dict) else value


def has_class(comfyui, case) -> bool:
    """Whether this ComfyUI has the case's model."""
    newer = case.native.newer
    return not newer or f"class {newer}(" in (comfyui.checkout / "comfy" / "supported_models.py").read_text("utf-8")


def skip_without_class(comfyui, case) -> None:
    if not has_class(comfyui, case):
        missing(f"this ComfyUI has no {case.native.newer}; COMFYUI_PATH may name a newer one", expected=False)


def save_case(case, base: Path) -> None:
    """Its file, and its conditioning for inside/families.py."""
    case.save(
        case.model(case.native.config), base / "models/diffusion_models" / f"{case.name}.safetensors", case.native.config
    )
    native, generator = case.native, torch.Generator().manual_seed(5)
    tensors = {"latent": torch.zeros(1, *native.latent)}
    if native.companion is not None:
        tensors["companion"] = torch.zeros(1, *native.companion)
        tensors |= {
            name: (torch.rand(1, *shape, generator=generator) * 4).round() / 4 for name, shape in native.masks.items()
        }
    plain = {}
    for sign in ("positive", "negative"):
        tensors[f"{sign}.text"], extras = native.conditioning(generator)
        for key, value in extras.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{sign}.{key}"] = value
            elif isinstance(value, list) and isinstance(value[0], torch.Tensor):
                tensors |= {f"{sign}.{key}/{index}": item for index, item in enumerate(value)}
            else:
                plain[key] = described(value, tensors)
    settings = {
        "cfg": native.cfg,
        "scheduler": native.scheduler,
        "extras": plain,
        "detected": native.detected,
        "boolean_masks": native.boolean_masks,
    }
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, base / f"{case.name}.inputs.safetensors", {"settings": json.dumps(settings)})


@pytest.fixture(scope="module")
def parity(request, comfyui, inside, base):
    """Results by case, of one run of ComfyUI for those cases that were selected."""
    selected = {item.callspec.params["case"].name for item in request.session.items if item.path == request.path}
    cases = [case for case in CASES if case.name in selected and has_class(comfyui, case)]
    for case in cases:
        save_case(case, base)
    return inside.run("families", names=[case.name for case in cases])[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ksampler_equals_the_native_model(comfyui, parity, case, measured):
    """With all of PipeFusion's steps warm-up: how ComfyUI's conditioning becomes the ranks' tensors. Other modes of a family
    are in tests/families."""
    skip_without_class(comfyui, case)
    native, found = parity[f"{case.name}, native"], parity[case.name]
    assert "error" not in native, native
    assert native["finite"]
    assert native["largest"] > 0.1
    assert native["other LoRA names"] == []
    assert "error" not in found, found
    assert found["whole because"] == [None]
    patching = case.row.patching
    axis = patching.best_axis(patching.grid(case.native.latent)) if patching.video else None
    assert found["cut along"] == [axis]
    measured(f"ComfyUI parity, largest difference, {case.name}", found["difference"])
    assert math.isfinite(found["difference"])
    assert found["difference"] <= case.native.limit
