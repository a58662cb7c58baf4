"""A real ComfyUI for the tests of this folder: its server over HTTP, and scripts run inside it.

The test process imports nothing of ComfyUI: it starts ComfyUI's own Python, which may be another one.
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui_server import PACK, STOP_SECONDS, ComfyUIServer, find_python, missing_requirements
from tests.comfyui import standins
from tests.support import tiny
from tests.support.requirements import missing

HERE = Path(__file__).parent
SCRIPT_SECONDS = 900.0
FORKED_RANKS = HERE / "forked_ranks"
FOLDER = "parallel-dit"
"""The pack's own under custom_nodes. Of packs in folders with spaces ComfyUI finds no templates and no help pages."""
FLUX = tiny.FLUX | {
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
"""Like tiny.FLUX, of a width that ComfyUI's own model detection takes: a multiple of 128 with rotary axes (16, 56, 56)."""
SD3 = tiny.SD3 | {
    "num_layers": 3,
    "attention_head_dim": 64,
    "num_attention_heads": 3,
    "caption_projection_dim": 192,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}
"""Like tiny.SD3, for ComfyUI, which takes depth and heads from the width: one of either for each 64 of it."""


@dataclass(frozen=True)
class ComfyUI:
    """A checkout and the Python that runs it."""

    checkout: Path
    python: Path


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
    """ComfyUI's base directory: a tiny Flux and SD3, files that are no models, LoRAs, and a latent of the wrong kind."""
    base = tmp_path_factory.mktemp("comfyui base")
    models, loras, inputs = (base / name for name in ("models/diffusion_models", "models/loras", "input"))
    for folder in (models, loras, inputs):
        folder.mkdir(parents=True)
    whole = tiny.save_original(tiny.random_flux(FLUX), FLUX, models / "tiny.safetensors").read_bytes()
    (models / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    tiny.save_original(tiny.random_sd3(SD3), SD3, models / "tiny-sd3.safetensors", family="sd3")
    save_file({"encoder.conv_in.weight": torch.zeros(4, 3, 3, 3)}, models / "vae.safetensors")
    lora = {"lora_A.weight": torch.ones(4, 256), "lora_B.weight": torch.ones(256, 4)}
    layer = "diffusion_model.double_blocks.0.img_attn.proj"
    for kind, more in {"lora": {}, "enlarging": {"reshape_weight": torch.tensor([256, 512])}}.items():
        save_file({f"{layer}.{name}": value for name, value in (lora | more).items()}, loras / f"tiny-{kind}.safetensors")
    latent = {"latent_tensor": torch.ones(1, 4, 16, 16), "latent_format_version_0": torch.tensor([])}
    save_file(latent, inputs / "four-channels.latent")
    return base


class Inside:
    """A booted ComfyUI without a server, which runs the scripts of the folder inside/ one after the other: see serve.py."""

    def __init__(self, comfyui: ComfyUI, base: Path):
        self._base = base
        self._log = (base / "inside.log").open("w")
        self._process = subprocess.Popen(
            [comfyui.python, HERE / "inside" / "serve.py", comfyui.checkout, base],
            cwd=base,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # a process that has threads cannot be forked
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(
        self, script: str, *, here: bool = False, skip: Iterable[str] = (), **arguments: Any
    ) -> tuple[dict[str, Any], str]:
        """Its main(**arguments): (what it found by case, all that it and its ranks printed).

        `here`: in the process that all later scripts are forked from. `skip`: cases that it need not measure.
        """
        result, output = (self._base / f"{script}.{ending}" for ending in ("json", "txt"))
        request = {"script": script, "arguments": arguments, "result": str(result), "output": str(output)}
        request |= {"here": here, "skip": list(skip)}
        with timed(SCRIPT_SECONDS, self._process):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            code = self._process.stdout.readline().strip()
        said = output if output.exists() else Path(self._log.name)
        printed = said.read_text(errors="replace")
        assert code == "0", f"{script} failed:\n{printed[-8000:]}"
        logs = sorted((self._base / "user" / "parallel_dit" / "logs").glob("rank-*"))  # the last two starts' of each rank
        return json.loads(result.read_text()), printed + "".join(log.read_text() for log in logs)

    @property
    def ended(self) -> bool:
        """It was killed, for a script that took too long."""
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(STOP_SECONDS)
        self._process.stdout.close()
        self._log.close()


def unselected(request: pytest.FixtureRequest, *names: str, of: Iterable[tuple]) -> list[str]:
    """Of these values of parameters with these names, those of no test of this file that is to run, as "one, other"."""
    calls = [
        item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    wanted = {tuple(call[name] for name in names) for call in calls if set(names) <= call.keys()}
    return [", ".join(map(str, values)) for values in of if values not in wanted]


@contextmanager
def timed(seconds: float, process: subprocess.Popen) -> Iterator[None]:
    """After so many seconds within it the process is killed, with all that it started: whoever waits for it is let go."""

    def kill() -> None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture(scope="session")
def bundled_workflows_models(base) -> None:
    """Files under the names that the bundled workflows use."""
    standins.write(base / "models")


@pytest.fixture(scope="session")
def inside(comfyui, base) -> Iterator[Inside]:
    inside = Inside(comfyui, base)
    yield inside
    inside.close()


@pytest.fixture(scope="session")
def session_server(comfyui, base) -> Iterator[ComfyUIServer]:
    with ComfyUIServer(
        comfyui.checkout, base, comfyui.python, packs=(standins.ENCODERS_PACK, FORKED_RANKS), folder=FOLDER
    ) as server:
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
