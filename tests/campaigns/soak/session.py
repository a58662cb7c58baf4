"""A running ComfyUI that is sent prompts, one soak or the references of one."""

import io
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from parallel_backend.rank.worker import REST_SECONDS
from scripts.comfyui_server import ComfyUIServer, Outcome

from .processes import Watch
from .record import CANCELLED, EMPTY, FAILED, FINISHED, Ending, Soak
from .requests import Prompt, Request, prompt
from .schedule import BOTH, EVERYTHING, FREE, Batch, Turn

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

    def send(self, request: Request, trace: bool = False) -> tuple[str, Prompt]:
        """Queue it: (the prompt's id, the prompt)."""
        self.serial += 1
        made = prompt(request, self.serial, trace)
        return self.server.queue(made.nodes), made

    def arrays(self, outcome: Outcome, made: Prompt) -> Arrays:
        """The latent and the pictures."""
        (file,) = outcome.outputs[made.latent]["latents"]
        latent = load_file(self.base / file["type"] / file["subfolder"] / file["filename"])["latent_tensor"]
        return latent, *(np.array(Image.open(io.BytesIO(image))) for image in outcome.images)


def compute_references(session: Session, requests: Iterable[Request], said: Callable[[str], None]) -> dict[str, Reference]:
    """Each request alone, by its name: nothing is loaded before it. AssertionError for what could not show a mistake."""
    found: dict[str, Reference] = {}
    for request in requests:
        session.server.run(UNLOAD_PROMPT)
        began = time.monotonic()
        prompt_id, made = session.send(request)
        outcome = session.server.wait(prompt_id)
        assert outcome.status == "success", f"{request}: {outcome.error}"
        arrays = session.arrays(outcome, made)
        assert np.isfinite(arrays[0]).all(), f"{request}: the latent is not finite"
        assert all(array.std() > 0 for array in arrays), f"{request}: a picture of one colour"
        for name, other in found.items():
            assert difference(arrays, other.arrays) > 0, f"{request.name} and {name} give the same"
        found[request.name] = Reference(arrays, time.monotonic() - began)
        said(f"alone: {request.name}, {found[request.name].seconds:.1f} s")
    return found


@dataclass
class Run:
    """A soak under way: sends batches, cancels, compares, reads the processes."""

    session: Session
    watch: Watch
    references: dict[str, Reference]
    soak: Soak

    def batch(self, batch: Batch) -> None:
        sent = [(turn, *self.session.send(turn.request, turn.trace)) for turn in batch.turns]
        for turn, prompt_id, made in sent:
            if turn.cancel:
                time.sleep(turn.moment * self.references[turn.request.name].seconds / 3)  # most of it was loading
                self.session.server.post("/interrupt", {} if turn.cancel == EVERYTHING else {"prompt_id": prompt_id})
            self.soak.endings.append(self._ending(turn, prompt_id, made))
        if batch.turns:
            self._read("")
        self._afterwards(batch.after)

    def _ending(self, turn: Turn, prompt_id: str, made: Prompt) -> Ending:
        known = len(self.soak.endings) + 1, turn.request.name, turn.request.setup.name, turn.cancel
        try:
            outcome = self.session.server.wait(prompt_id)
        except TimeoutError as hang:
            return Ending(*known, FAILED, error=str(hang))
        if outcome.status == "interrupted":
            return Ending(*known, CANCELLED)
        if outcome.status != "success":
            return Ending(*known, FAILED, error=outcome.error)
        found = difference(self.session.arrays(outcome, made), self.references[turn.request.name].arrays)
        return Ending(*known, FINISHED, difference=found)

    def _read(self, state: str) -> None:
        time.sleep(3 * REST_SECONDS)  # with the time between a step's messages
        self.soak.readings += self.watch.read(len(self.soak.endings), state)

    def _afterwards(self, what: str) -> None:
        if what in (FREE, BOTH):
            self.session.server.post("/free", {"unload_models": True, "free_memory": True})
            time.sleep(FREE_SECONDS)
        if not what or what == FREE:
            return
        outcome = self.session.server.run(UNLOAD_PROMPT)
        if outcome.status != "success":
            self.soak.failures.append(f"{what} after prompt {len(self.soak.endings)}: {outcome.error}")
        if what == BOTH:
            self._read(EMPTY)
