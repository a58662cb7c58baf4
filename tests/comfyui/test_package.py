"""What the registry packs, installed as a user would: copied, under a name of its own, with spaces in the path."""

import pytest

from scripts.comfyui_server import ComfyUIServer
from tests.comfyui.test_server import pixels, small
from tests.support.package_files import install

pytestmark = pytest.mark.comfyui

FOLDER = "parallel.dit (copy) v2"


def test_the_package_runs_from_any_folder(comfyui, tmp_path):
    base = tmp_path / "a base with spaces"
    install(base / "custom_nodes" / FOLDER)
    with ComfyUIServer(comfyui.checkout, base, comfyui.python, folder=FOLDER) as server:
        ours = {name for name, node in server.object_info().items() if node["category"] == "Parallel DiT"}
        outcome = server.run(small(seed=5))
        assert outcome.status == "success", outcome.error
        assert pixels(outcome.images[0]).std() > 0
    assert {"ParallelDiTLoader", "PipeFusionSampler", "ParallelDoctor", "ParallelTrace", "ParallelVAEDecode"} <= ours
    assert not (base / "custom_nodes" / FOLDER).is_symlink()
    assert not (base / "custom_nodes" / FOLDER / "tests").exists()
