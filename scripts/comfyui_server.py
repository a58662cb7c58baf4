"""A headless ComfyUI with this pack alone, in a process and base directory of its own. Standard library only.

Used by run_comfyui_workflow.py and by tests/comfyui, which load this file by its path.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACK = Path(__file__).resolve().parent.parent
PACK_FOLDER = "Parallel DiT"
"""The pack's folder under custom_nodes; the space is deliberate: users' folders have them."""
REQUIREMENTS = (
    "torch",
    "torchsde",
    "torchaudio",
    "aiohttp",
    "safetensors",
    "comfyui_frontend_package",
    "diffusers",
)
"""What ComfyUI and the pack need; enough of it to tell an environment that is ready from one that is not."""
START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
PORT_TAKEN = re.compile(r"Port \d+ is already in use")
"""What ComfyUI says before it ends because another process took the port that was free a moment ago."""
STARTS = 3
"""How often it is started at most, each time at another port, when that happens."""


def find_python(checkout: Path) -> Path:
    """The interpreter that this checkout is run with: its own environment, COMFYUI_PYTHON, or the current one."""
    names = ("bin/python", "Scripts/python.exe")
    own = [checkout / folder / name for folder in (".venv", "venv") for name in names]
    return next((path for path in own if path.exists()), Path(os.environ.get("COMFYUI_PYTHON") or sys.executable))


def missing_requirements(python: Path) -> list[str]:
    """Those of REQUIREMENTS that `python` does not have. Imports none of them."""
    code = "import sys, importlib.util as u; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
    found = subprocess.run([python, "-c", code, *REQUIREMENTS], capture_output=True, text=True, check=True)
    return found.stdout.split()


class PromptRefused(Exception):
    """ComfyUI's validation did not take the prompt. The text says why, for each node."""


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt. `status`: success, error, interrupted or refused. `outputs`: node id -> what it showed."""

    status: str
    error: str
    outputs: dict[str, Any]
    images: tuple[bytes, ...]


class ComfyUIServer:
    """Use as a context manager: the server is ready inside it, and stopped, ranks included, after it."""

    def __init__(
        self,
        checkout: Path,
        base: Path,
        python: Path | None = None,
        arguments: tuple[str, ...] = ("--cpu",),
        packs: tuple[Path, ...] = (),
        folder: str = PACK_FOLDER,
    ):
        """`packs`: folders of further custom node packs. `folder`: this pack's own name under custom_nodes."""
        self.checkout, self.base, self.python = Path(checkout), Path(base), python or find_python(Path(checkout))
        self.arguments = arguments
        self.packs = {folder: PACK} | {pack.name: pack for pack in packs}
        self.log = self.base / "comfyui.log"
        self.process: subprocess.Popen | None = None
        self.port = 0

    def __enter__(self) -> "ComfyUIServer":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it answers. RuntimeError, with the log's end, if it does not."""
        packs = self.base / "custom_nodes"
        for folder in (packs, self.base / "models" / "diffusion_models", self.base / "input"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, folder in self.packs.items():
            if not (packs / name).exists():
                (packs / name).symlink_to(folder, target_is_directory=True)
        for _ in range(STARTS):
            self._launch()
            if self._answers():
                return
            if self.process.poll() is None or not PORT_TAKEN.search(self.log_tail()):
                break
        raise RuntimeError(f"ComfyUI did not start:\n{self.log_tail()}")

    def _launch(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            *(self.python, "main.py", "--listen", "127.0.0.1", "--port", str(self.port)),
            *("--base-directory", self.base, "--database-url", "sqlite:///:memory:", "--disable-api-nodes"),
            *("--disable-all-custom-nodes", "--whitelist-custom-nodes", *self.packs, *self.arguments),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.checkout,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A shell starts what it puts into the background deaf to Ctrl+C, and so are that one's children.
                preexec_fn=_hear_ctrl_c if os.name == "posix" else None,
            )

    def _answers(self) -> bool:
        """Whether it answers within START_SECONDS. Waits for that or for its end."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self._is_this_one(self.get("/system_stats")):
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def _is_this_one(self, system_stats: bytes) -> bool:
        """Whether the answer is of the process that was started, not of a ComfyUI that took the port before it."""
        return str(self.base) in json.loads(system_stats)["system"]["argv"]

    def stop(self) -> None:
        """End the server as Ctrl+C does, or by force if it does not follow. Idempotent."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log_tail(self, lines: int = 60) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def get(self, path: str, **query: str) -> bytes:
        return self._request(f"{path}?{urllib.parse.urlencode(query)}" if query else path, None)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        return self._request(path, json.dumps(body).encode())

    def object_info(self) -> dict[str, Any]:
        return json.loads(self.get("/object_info"))

    def queue(self, prompt: dict[str, Any], client_id: str = "", **extra_data: Any) -> str:
        """Queue a prompt in API form; its id. `extra_data`: such as `preview_method`. Raises PromptRefused."""
        body = {"prompt": prompt, "client_id": client_id, "extra_data": extra_data}
        try:
            return json.loads(self.post("/prompt", body))["prompt_id"]
        except urllib.error.HTTPError as refusal:
            with refusal:
                raise PromptRefused(_validation_text(json.loads(refusal.read()))) from refusal

    def wait(self, prompt_id: str, seconds: float = 600.0) -> Outcome:
        """Wait for the prompt's end. TimeoutError if it does not come, RuntimeError if the server has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            history = json.loads(self.get(f"/history/{prompt_id}"))
            if prompt_id in history:
                return self._outcome(history[prompt_id])
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode}:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"the prompt did not end within {seconds:.0f} s:\n{self.log_tail()}")

    def run(self, prompt: dict[str, Any], seconds: float = 600.0) -> Outcome:
        """What becomes of a prompt. One that ComfyUI's validation does not take has the status `refused`."""
        try:
            prompt_id = self.queue(prompt)
        except PromptRefused as refusal:
            return Outcome("refused", str(refusal), {}, ())
        return self.wait(prompt_id, seconds)

    def _outcome(self, entry: dict[str, Any]) -> Outcome:
        messages = dict(entry["status"]["messages"])
        if "execution_interrupted" in messages:
            status, error = "interrupted", ""
        elif "execution_error" in messages:
            told = messages["execution_error"]
            status, error = "error", f"{told['node_type']}: {told['exception_message'].strip()}"
        else:
            status, error = entry["status"]["status_str"], ""
        files = [file for shown in entry["outputs"].values() for file in shown.get("images", ())]
        images = (self.get("/view", **{key: file[key] for key in ("filename", "subfolder", "type")}) for file in files)
        return Outcome(status, error, entry["outputs"], tuple(images))

    def _request(self, path: str, body: bytes | None) -> bytes:
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        # No proxy, whatever the environment says: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, body, headers), timeout=60) as reply:
            return reply.read()


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _validation_text(reply: dict[str, Any]) -> str:
    lines = [f"{reply['error']['message']} {reply['error']['details']}".strip()]
    for node in reply["node_errors"].values():
        lines += [f"{node['class_type']}: {error['message']}: {error['details']}" for error in node["errors"]]
    return "\n".join(lines)
