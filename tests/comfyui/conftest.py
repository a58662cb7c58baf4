"""A real ComfyUI for the tests of this folder: its server over HTTP, and scripts run inside it.

The test process imports nothing of ComfyUI: it starts ComfyUI's own Python, which may be another one.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui_server import PACK, ComfyUIServer, find_python, missing_requirements
from testing import mini
from testing.comfyui import sd3_file
from testing.comfyui.scripted import FORKED_RANKS, ComfyUI, Inside
from tests.comfyui import standins
from tests.support.requirements import missing

HERE = Path(__file__).parent
SCRIPTS = HERE / "inside"
FOLDER = "parallel-dit"
"""The pack's own under custom_nodes. Of packs in folders with spaces ComfyUI finds no templates and no help pages."""


def ready(checkout: Path) -> ComfyUI:
    """The checkout with its Python. Skips where that cannot run it."""
    python = find_python(checkout)
    if lacking := missing_requirements(python):
        missing(f"{python} lacks {', '.join(lacking)}, which ComfyUI or the pack needs")
    return ComfyUI(checkout, python)


@pytest.fixture(scope="session")
def comfyui() -> ComfyUI:
    """COMFYUI_PATH, the checkout this pack is installed in, or ~/ComfyUI. Skips where there is none that can run."""
    given = os.environ.get("COMFYUI_PATH")
    installed = [PACK.parent.parent] if PACK.parent.name == "custom_nodes" else []
    places = [Path(given)] if given else [*installed, Path.home() / "ComfyUI"]
    checkout = next((place.resolve() for place in places if (place / "comfy" / "samplers.py").is_file()), None)
    if checkout is None:
        anything = given is not None or any(place.exists() for place in places)
        missing(f"no ComfyUI at {' or '.join(map(str, places))}; set COMFYUI_PATH to a checkout", expected=anything)
    return ready(checkout)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """ComfyUI's base directory: a tiny Flux and SD3, files that are no models, and a latent of the wrong kind."""
    base = tmp_path_factory.mktemp("comfyui base")
    models, loras, inputs = (base / name for name in ("models/diffusion_models", "models/loras", "input"))
    for folder in (models, loras, inputs):
        folder.mkdir(parents=True)
    mini.save(mini.random_model(mini.IN_COMFYUI), models / "tiny.safetensors")
    sd3_file.write(models / "tiny-sd3.safetensors")
    save_file({"encoder.conv_in.weight": torch.zeros(4, 3, 3, 3)}, models / "vae.safetensors")
    latent = {"latent_tensor": torch.ones(1, 4, 16, 16), "latent_format_version_0": torch.tensor([])}
    save_file(latent, inputs / "four-channels.latent")
    return base


def mostly_full(values: Iterable, default: Iterable) -> list:
    """The values as parameters, of which the default tier has those of `default`, and the full tier all."""
    values, default = list(values), list(default)
    assert set(default) <= set(values), set(default) - set(values)
    return [pytest.param(value, marks=() if value in default else pytest.mark.full) for value in values]


def asked(request: pytest.FixtureRequest, *names: str) -> set:
    """What this session's tests of the file ask for by parameters of these names: a script need not measure others."""
    called = [item.callspec.params for item in request.session.items if item.path == request.path and "[" in item.name]
    found = [tuple(params[name] for name in names) for params in called if set(names) <= set(params)]
    return {each[0] if len(names) == 1 else each for each in found}


@pytest.fixture(scope="session")
def bundled_workflows_models(base) -> None:
    """Files under the names that the bundled workflows use."""
    standins.write(base / "models")


class Found(dict):
    """By case what a script found. AssertionError for a case that raised."""

    def __getitem__(self, case: str) -> Any:
        got = super().__getitem__(case)
        assert not isinstance(got, dict) or "error" not in got, got.get("traceback", got)
        return got

    def error(self, case: str) -> str:
        """Class and text of what the case raised."""
        return super().__getitem__(case)["error"]


class Scripts(Inside):
    """Whose scripts give a Found."""

    def run(self, script: str, **named: Any) -> tuple[Found, str]:
        found, said = super().run(script, **named)
        return Found(found), said


@pytest.fixture(scope="session")
def inside(comfyui, base) -> Iterator[Scripts]:
    inside = Scripts(comfyui, base, SCRIPTS)
    yield inside
    inside.close()


@pytest.fixture(scope="module")
def found(request, inside) -> Found:
    """What the script found that has the test file's name."""
    return inside.run(request.path.stem.removeprefix("test_"))[0]


@pytest.fixture(scope="session")
def session_server(comfyui, base) -> Iterator[ComfyUIServer]:
    with ComfyUIServer(comfyui.checkout, base, comfyui.python, packs=(FORKED_RANKS,), folder=FOLDER) as server:
        yield server
        left = ranks(server)
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, f"ranks {[process.pid for process in alive]} outlived ComfyUI, which was stopped as by Ctrl+C"


@pytest.fixture
def server(session_server, request) -> Iterator[ComfyUIServer]:
    """A running ComfyUI, the same one for all tests, with an empty queue. Its log is shown where a test fails."""
    start = session_server.log.stat().st_size
    session_server.post("/queue", {"clear": True})
    yield session_server
    with session_server.log.open("rb") as log:
        log.seek(start)
        request.node.add_report_section("teardown", "ComfyUI's log", log.read().decode(errors="replace")[-8000:])


def ranks(server: ComfyUIServer) -> list[psutil.Process]:
    """The server's rank processes, in the order of their start, which is the order of their numbers."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sorted((child for child in children if is_rank(child)), key=lambda child: (child.create_time(), child.pid))


def is_rank(process: psutil.Process) -> bool:
    """Spawned, or forked by the pack forked_ranks: then the command line is that of the process it was forked from."""
    command, parent = (" ".join(each.cmdline()) for each in (process, process.parent()))
    return "multiprocessing.spawn" in command or ("multiprocessing.forkserver" in command and command == parent)


@pytest.fixture
def rank_processes(server) -> Callable[[], list[psutil.Process]]:
    return lambda: ranks(server)
