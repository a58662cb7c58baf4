"""A running ComfyUI that is sent prompts, one soak or the references of one."""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from parallel_backend.rank.worker import REST_SECONDS
from scripts.comfyui_server import ComfyUIServer

from .processes import Watch
from .record import CANCELLED, DELETED, EMPTY, FAILED, FINISHED, Ending, Soak
from .requests import Prompt, Request, prompt
from .schedule import BOTH, DELETE, DOCTOR, EVERYTHING, FREE, TWICE, Batch, Turn
from .setups import FILES

LIMIT_SECONDS = 600.0
"""A prompt that has not ended by then counts as hanging."""
POLL_SECONDS = 0.03
FREE_SECONDS = 0.5
"""Until ComfyUI has looked at what its button sets."""
UNLOAD_PROMPT = {"1": {"class_type": "UnloadParallelDiT", "inputs": {}}}
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Reference:
    """A request computed alone: its latent and, where it has them, pictures; the seconds that it took."""

    arrays: Arrays
    seconds: float


def difference(found: Arrays, expected: Arrays) -> float:
    """Largest difference; 0 only if shapes, dtypes and all bits are equal, infinite if they cannot be compared."""
    if [(array.shape, array.dtype) for array in found] != [(array.shape, array.dtype) for array in expected]:
        return math.inf
    if all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)):
        return 0.0
    largest = max(float(np.abs(a.astype(float) - b).max()) for a, b in zip(found, expected, strict=True))
    return math.inf if math.isnan(largest) else largest or math.ulp(0.0)  # -0.0 for 0.0 is no equal bit


@dataclass
class Session:
    """`base`: the server's base directory."""

    server: ComfyUIServer
    base: Path
    serial: int = 0
    _made: list[Path] = field(default_factory=list)

    def send(self, request: Request, trace: bool = False) -> tuple[str, Prompt]:
        """Queue it: (the prompt's id, the prompt)."""
        self.serial += 1
        made = prompt(request, self.serial, trace)
        return self.server.queue(made.nodes), made

    def entry(self, prompt_id: str) -> dict[str, Any] | None:
        """What ComfyUI's history says of it, which is then forgotten there; None while it has not ended."""
        found = json.loads(self.server.get(f"/history/{prompt_id}")).get(prompt_id)
        if found is not None:
            self.server.post("/history", {"delete": [prompt_id]})
        return found

    def queued(self) -> list[str]:
        """Ids of the prompts that run or wait."""
        queue = json.loads(self.server.get("/queue"))
        return [item[1] for item in (*queue["queue_running"], *queue["queue_pending"])]

    def wait(self, prompt_id: str) -> dict[str, Any] | None:
        """Its entry; None where it was deleted. TimeoutError if it hangs, RuntimeError if the server has ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            if (found := self.entry(prompt_id)) is not None:
                return found
            if prompt_id not in self.queued():
                return self.entry(prompt_id)  # it may have ended in between
            if self.server.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.server.process.returncode}:\n{self.server.log_tail()}")
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"no end within {LIMIT_SECONDS:.0f} s")

    def run(self, nodes: dict[str, Any]) -> None:
        """A prompt that is to succeed. RuntimeError with the node's error if it does not."""
        entry = self.wait(self.server.queue(nodes))
        if (error := error_of(entry)) or not entry["status"]["completed"]:
            raise RuntimeError(error or "the prompt did not complete")

    def arrays(self, entry: dict[str, Any], made: Prompt) -> Arrays:
        """The latent and the pictures; their files are removed."""
        outputs = entry["outputs"]
        (latent,) = outputs[made.latent]["latents"]
        path = self._path(latent)
        found = [load_file(path)["latent_tensor"]]
        path.unlink()
        for file in outputs[made.picture]["images"] if made.picture else ():
            path = self._path(file)
            with Image.open(path) as picture:
                found.append(np.array(picture))
            path.unlink()
        return tuple(found)

    def _path(self, file: dict[str, str]) -> Path:
        return self.base / file["type"] / file["subfolder"] / file["filename"]


def error_of(entry: dict[str, Any]) -> str:
    told = dict(entry["status"]["messages"]).get("execution_error")
    return f"{told['node_type']}: {told['exception_message'].strip()}" if told else ""


def seconds_of(entry: dict[str, Any]) -> float:
    """By ComfyUI's own clock, from its start to its end, whichever that was."""
    times = [data["timestamp"] for _, data in entry["status"]["messages"]]
    return (max(times) - min(times)) / 1000


def compute_references(session: Session, requests: Iterable[Request], said: Callable[[str], None]) -> dict[str, Reference]:
    """Each request alone, by its name: nothing is loaded before it. AssertionError for what could not show a mistake."""
    found: dict[str, Reference] = {}
    for request in requests:
        session.run(UNLOAD_PROMPT)
        prompt_id, made = session.send(request)
        entry = session.wait(prompt_id)
        assert not error_of(entry), f"{request}: {error_of(entry)}"
        arrays = session.arrays(entry, made)
        assert np.isfinite(arrays[0]).all(), f"{request}: the latent is not finite"
        assert all(array.std() > 0 for array in arrays), f"{request}: a picture of one colour"
        for name, other in found.items():
            assert difference(arrays, other.arrays) > 0, f"{request.name} and {name} give the same"
        found[request.name] = Reference(arrays, seconds_of(entry))
        said(f"alone: {request.name}, {found[request.name].seconds:.1f} s")
    return found


@dataclass
class Run:
    """A soak under way: sends batches, cancels, compares, reads the processes."""

    session: Session
    watch: Watch
    references: dict[str, Reference]
    soak: Soak
    _expected: dict[str, float] = field(default_factory=dict)  # seconds by request, once it has run among others

    def batch(self, batch: Batch) -> None:
        sent = [(turn, *self.session.send(turn.request, turn.trace)) for turn in batch.turns]
        for turn, prompt_id, _ in sent:
            if turn.cancel == DELETE:
                self.session.server.post("/queue", {"delete": [prompt_id]})
        for turn, prompt_id, made in sent:
            if turn.cancel not in ("", DELETE):
                time.sleep(turn.moment * self._seconds(turn.request.name))
                target = {} if turn.cancel == EVERYTHING else {"prompt_id": prompt_id}
                for _ in range(2 if turn.cancel == TWICE else 1):
                    self.session.server.post("/interrupt", target)
            self.soak.endings.append(self._ending(turn, prompt_id, made))
        if batch.turns:
            self._read("")
        self._afterwards(batch.after)

    def _ending(self, turn: Turn, prompt_id: str, made: Prompt) -> Ending:
        number, request = len(self.soak.endings) + 1, turn.request
        known = (number, request.name, request.setup.name, turn.cancel)
        try:
            entry = self.session.wait(prompt_id)
        except TimeoutError as hang:
            return Ending(*known, FAILED, LIMIT_SECONDS, error=str(hang))
        if entry is None:
            return Ending(*known, DELETED, 0.0)
        seconds, messages = seconds_of(entry), dict(entry["status"]["messages"])
        if "execution_interrupted" in messages:
            return Ending(*known, CANCELLED, seconds)
        if error := error_of(entry):
            return Ending(*known, FAILED, seconds, error=error)
        self._expected[request.name] = min(seconds, self._seconds(request.name))
        computed = made.sampler not in messages["execution_cached"]["nodes"]
        found = difference(self.session.arrays(entry, made), self.references[request.name].arrays)
        return Ending(*known, FINISHED, seconds, computed=computed, difference=found)

    def _seconds(self, request: str) -> float:
        """Of the request among others; alone most of its time is loading."""
        return self._expected.get(request, self.references[request].seconds / 3)

    def _read(self, state: str) -> None:
        time.sleep(3 * REST_SECONDS)  # with the time between a step's messages
        self.soak.readings += self.watch.read(len(self.soak.endings), state)

    def _afterwards(self, what: str) -> None:
        if not what:
            return
        if what in (FREE, BOTH):
            self.session.server.post("/free", {"unload_models": True, "free_memory": True})
            time.sleep(FREE_SECONDS)
        if what == FREE:
            return
        try:
            self.session.run(doctor() if what == DOCTOR else UNLOAD_PROMPT)
        except (RuntimeError, TimeoutError) as error:
            self.soak.failures.append(f"{what} after prompt {len(self.soak.endings)}: {error}")
        if what == BOTH:
            self._read(EMPTY)


def doctor() -> dict[str, Any]:
    """Parallel Doctor for the mini model on two ranks."""
    loader = {"model_name": FILES["digits"], "weight_dtype": "fp32", "devices": "cpu,cpu", "stage_split": "even"}
    degrees = {"pipefusion_degree": 2, "tensor_parallel_degree": 1, "split_batch_degree": 1}
    widgets = {"steps": 4, "cfg": 3.0, "text_tokens": 4, "devices": "auto"}
    return {
        "1": {"class_type": "ParallelDiTLoader", "inputs": loader | degrees},
        "2": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "3": {"class_type": "ParallelDoctor", "inputs": {"model": ["1", 0], "latent_image": ["2", 0], **widgets}},
    }
