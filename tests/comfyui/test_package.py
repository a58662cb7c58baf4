"""What the registry packs, installed as a user would: copied, under a name of its own, with spaces in the path.

Its ranks are spawned, as users' are; those of the other tests' ComfyUI are forked (see forked_ranks).
"""

from collections.abc import Iterator

import pytest

from scripts.comfyui_server import ComfyUIServer
from tests.comfyui.test_server import pixels, small
from tests.support.package_files import install

pytestmark = pytest.mark.comfyui

FOLDER = "parallel.dit (copy) v2"


@pytest.fixture(scope="module")
def server(comfyui, tmp_path_factory) -> Iterator[ComfyUIServer]:
    base = tmp_path_factory.mktemp("a base") / "with spaces"
    install(base / "custom_nodes" / FOLDER)
    with ComfyUIServer(comfyui.checkout, base, comfyui.python, folder=FOLDER) as server:
        yield server


def test_the_package_runs_from_any_folder(server):
    ours = {name for name, node in server.object_info().items() if node["category"] == "Parallel DiT"}
    outcome = server.run(small(seed=5))
    assert outcome.status == "success", outcome.error
    assert pixels(outcome.images[0]).std() > 0
    assert {"ParallelDiTLoader", "PipeFusionSampler", "ParallelDoctor", "ParallelTrace", "ParallelVAEDecode"} <= ours
    assert not (server.base / "custom_nodes" / FOLDER).is_symlink()
    assert not (server.base / "custom_nodes" / FOLDER / "tests").exists()
