"""Files in published layouts: what Parallel DiT loads and leaves out is what ComfyUI does."""

import pytest

from tests.checkpoints.published_layouts import LAYOUTS

pytestmark = pytest.mark.comfyui

PLACES = ("a.SAFETENSORS", "b.sft", "c.GGUF", "FLUX.1-dev/flux1-dev.safetensors", "FLUX.1-dev/config.json")
"""Files of a folder that is linked into models/diffusion_models."""


@pytest.fixture(scope="module")
def found(inside, base):
    folder = base / "models" / "diffusion_models"
    paths = {each.name: each.save(folder) for each in LAYOUTS}
    elsewhere = base / "elsewhere"
    for name in PLACES:
        path = elsewhere / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    (folder / "linked").symlink_to(elsewhere, target_is_directory=True)
    yield inside.run("published_layouts", files={name: path.name for name, path in paths.items()})[0]
    (folder / "linked").unlink()
    for path in (*paths.values(), *folder.glob("*.whole")):
        path.unlink()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_the_pack_does_with_a_file_what_comfyui_does(found, layout):
    got = found[layout.name]
    native, ours = got["comfyui"], got["pack"]
    assert ("refused" not in native and not native["missing"]) == layout.native, native
    if layout.refused:
        assert "refused" in ours, ours
        return
    assert native["kind"] == ours["kind"]
    assert set(ours["unused"]) == set(layout.unused)
    assert set(layout.unused) <= set(native["unexpected"])


def test_a_unet_in_diffusers_names_is_converted_as_comfyui_converts_it(found):
    assert found["conversion of unet"] is True


def test_files_are_listed_as_comfyui_lists_them_and_gguf_files_too(found):
    listed, by_comfyui = (set(found["listed"][key]) for key in ("pack", "comfyui"))
    assert listed >= by_comfyui
    assert {name for name in listed if name.startswith("linked/")} == (
        {f"linked/{name}" for name in PLACES if not name.endswith(".json")}
    )
