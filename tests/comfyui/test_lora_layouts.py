"""LoRA files in published layouts: what Parallel DiT takes of each is what ComfyUI takes."""

import pytest
from safetensors.torch import save_file

from tests.comfyui.lora_layouts import ROWS

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(inside, base):
    files = {row.name: base / "models" / "loras" / f"{row.name}.safetensors" for row in ROWS}
    for row in ROWS:
        save_file({key: value.clone() for key, value in row.tensors.items()}, files[row.name], row.metadata)
    yield inside.run("lora_layouts", files=[path.name for path in files.values()])[0]
    for path in files.values():
        path.unlink()


@pytest.mark.parametrize("row", ROWS, ids=lambda each: each.name)
def test_a_lora_is_taken_as_comfyui_takes_it(found, row):
    got = found[f"{row.name}.safetensors"]
    assert "error" not in got, got
    assert got["pack"] == got["comfyui"]
    assert [key for key, _ in got["comfyui"]] == [f"diffusion_model.{key}" for key in row.loaded]
