"""Hundreds of prompts at random to a real ComfyUI.

    python -m tests.campaigns.soak [--prompts 500] [--seed 0] [--out FILE.json]

Every finished image must be bit for bit that of the same request alone, no process may grow, nothing may be left at the
end. Exit status 1 if that is not so.
"""

import argparse
import contextlib
import copy
import io
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import save_file

from parallel_backend.quickstart.model import WEIGHTS
from parallel_backend.rank.worker import REST_SECONDS
from scripts.comfyui_server import ComfyUIServer, Outcome, find_python
from testing.host_memory import held_bytes
from tests.comfyui import standins
from tests.comfyui.conftest import ranks
from tests.comfyui.graph import CONFIG, Graph, Link

from .result import keep

MODEL, LORA, VAE = "digits.safetensors", "soak-lora.safetensors", "ae.safetensors"
WIDTH, RANK = 256, 4
"""Of the model; of the LoRA."""
SIZES = ((128, 128), (120, 136), (96, 192), (152, 104), (64, 128), (200, 120), (160, 160), (72, 88))
"""Width and height in pixels; some give latents of odd sides."""
SAMPLERS = ("euler", "dpmpp_2m", "heun", "euler_ancestral", "euler", "dpm_adaptive")
STRENGTHS = (0.0, 0.0, 0.3, 0.6)
"""Of the LoRA; at 0 there is none."""
TEXTS = (("3 1 4 1",), ("2 7",), ("1 6 1 8", "_ _ 9"), ("5 7 7 2", "1 5", "6 6 _ 4"))
DENOISE_STEP = 1e-9
"""KSampler takes a `denoise` above 0.9999 for 1, so a smaller one makes ComfyUI run it again and changes nothing."""
EACH = 5
"""Requests for each setup, in a long soak."""
RESTARTS = 0.12
"""Share of prompts at the end, among which setups on other devices are."""
CANCELLED = 0.17
"""Cancelled prompts for each other one, each at a random part of the seconds that its request takes alone. In rounds none is
cancelled that has the ranks load: that ends them, and they are to live on."""
LATEST = 1.2
"""Of these seconds: some cancellations come too late."""
FREE_SECONDS, END_SECONDS = 0.5, 10.0
"""Until ComfyUI has looked at what its button sets; until a process has ended."""
GROWTH = 0.02
"""Of a process's memory with nothing loaded, from the second round to the last one."""
MORE = 2
"""File descriptors or threads that a process may have more at the end, with nothing loaded, than before."""
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc, which would keep freed memory of ComfyUI's process, up to 180 MB of it here, for its next request: a resident
size would then say how the heap lies, not what is held."""
UNLOAD_PROMPT = {"1": {"class_type": "UnloadParallelDiT", "inputs": {}}}
Arrays = tuple[np.ndarray, ...]


# What is asked for.


@dataclass(frozen=True)
class Setup:
    """`loader`: widgets of Parallel DiT Loader beside the defaults; `config`: of Ulysses Config.

    `ranks`: 0 for ComfyUI's own loader.
    """

    name: str
    ranks: int
    loader: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


PIPE = {"pipefusion_degree": 2}
DISPLACED = {"patch_mode": "displaced", "patch_degree": 2}
TWO_RANKS = (
    Setup("pipe", 2, PIPE),
    Setup("ulysses", 2, config={"ulysses_degree": 2}),
    Setup("ring", 2, config={"ring_degree": 2}),
    Setup("tensor", 2, {"tensor_parallel_degree": 2}),
    Setup("split batch", 2, {"split_batch_degree": 2}),
    Setup("displaced", 2, config=DISPLACED),
    Setup("naive", 2, config=DISPLACED | {"patch_mode": "naive"}),
    Setup("native", 0),
)
"""On the same two devices, so that the rank processes live on from one to the next."""
OTHER_RANKS = (Setup("one rank", 1), Setup("pipe x ulysses", 4, PIPE, {"ulysses_degree": 2}))
"""On other devices: with each of them the ranks are ended and new ones started."""


@dataclass(frozen=True)
class Request:
    """`sampled`: the sampler's output; `saved`: id of the node that saves it."""

    name: str
    graph: Graph
    sampled: Link
    saved: str

    def prompt(self, serial: int) -> dict[str, Any]:
        """Another `serial` makes ComfyUI sample again and asks for the same image."""
        prompt = copy.deepcopy(self.graph.prompt)
        prompt[self.sampled[0]]["inputs"]["denoise"] = 1.0 - DENOISE_STEP * serial
        return prompt


def draw(setup: Setup, each: int, seed: int) -> list[Request]:
    """`each` requests, the same for the same seed, of which the first one writes a trace."""
    chance = random.Random(f"{seed} {setup.name}")
    kinds = zip(chance.sample(SAMPLERS, each), chance.sample(SIZES, each), strict=True)
    return [_request(setup, number, *kind, chance) for number, kind in enumerate(kinds)]


def _request(setup: Setup, number: int, sampler: str, size: tuple[int, int], chance: random.Random) -> Request:
    graph, node, (width, height) = Graph(), "KSampler", size
    model, (first, *others) = _model(graph, setup, chance.choice(STRENGTHS)), chance.choice(TEXTS)
    positive = graph.text(first)
    for text in others:
        positive = graph.add("ConditioningConcat", conditioning_to=positive, conditioning_from=graph.text(text))
    cache = 0.3 if sampler == "euler" and setup.ranks and chance.random() < 0.4 else 0.0
    widgets = {
        "seed": chance.randrange(1 << 32),
        "steps": 6 if cache else chance.randint(2, 6),
        "cfg": chance.choice((1.0, 3.0, 3.0)),
        "sampler_name": sampler,
        "positive": positive,
    }
    bands = {"num_pipeline_patch": chance.choice((2, 3, 4)), "warmup_steps": chance.choice((1, 1, 2)), "overlap": True}
    if "pipefusion_degree" in setup.loader and chance.random() < 0.5:
        node, widgets = "PipeFusionSampler", widgets | bands | {"step_cache": cache}
    else:
        if "pipefusion_degree" in setup.loader:
            model = graph.add("ApplyPipeFusion", model=model, **bands)
        if cache:
            model = graph.add("ParallelStepCache", model=model, threshold=cache, start_percent=0.0, end_percent=1.0)
    empty = graph.add("EmptySD3LatentImage", width=width, height=height, batch_size=chance.choice((1, 1, 1, 2)))
    latent = graph.ksampler(model, empty, node, **widgets)
    (saved, _) = graph.add("SaveLatent", samples=latent, filename_prefix="soak")
    if setup.ranks and chance.random() < 0.3:
        vae = graph.add("VAELoader", vae_name=VAE)
        decoded = graph.add("ParallelVAEDecode", samples=latent, vae=vae, devices="auto")
        graph.add("SaveImage", images=decoded, filename_prefix="soak")
    if setup.ranks and number == 0:
        graph.add("ParallelTrace", filename_prefix="soak", after=latent)
    return Request(f"{setup.name} {number}", graph, latent, saved)


def _model(graph: Graph, setup: Setup, strength: float) -> Link:
    if setup.ranks == 0:
        model = graph.add("UNETLoader", unet_name=MODEL, weight_dtype="default")
    else:
        degrees = {"pipefusion_degree": 1, "tensor_parallel_degree": 1, "split_batch_degree": 1} | setup.loader
        config = {"parallel_config": graph.add("UlyssesConfig", **CONFIG | setup.config)} if setup.config else {}
        devices = ",".join(["cpu"] * setup.ranks)
        # Even: what ranks measure is not the same each time.
        widgets = {"model_name": MODEL, "weight_dtype": "fp32", "devices": devices, "stage_split": "even"}
        model = graph.add("ParallelDiTLoader", **widgets, **degrees, **config)
    if strength:
        model = graph.add("LoraLoaderModelOnly", model=model, lora_name=LORA, strength_model=strength)
    return model


def write_files(base: Path) -> None:
    """The files that the requests name: the bundled model, a random VAE, a LoRA for a layer of each stage."""
    transformers, vaes, loras = (base / "models" / kind for kind in ("diffusion_models", "vae", "loras"))
    for folder in (transformers, vaes, loras):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WEIGHTS, transformers / MODEL)
    save_file(standins.vae(channels=16), vaes / VAE)
    random = standins.Random()
    for layer, columns in {"double_blocks.0.img_attn.proj": WIDTH, "single_blocks.1.linear2": 5 * WIDTH}.items():
        random.weight(f"diffusion_model.{layer}.lora_A", RANK, columns)
        random.weight(f"diffusion_model.{layer}.lora_B", WIDTH, RANK)
    save_file(random.tensors, loras / LORA)


Turn = tuple[Request, float | None]
"""A prompt, and when it is cancelled, in units of the seconds that the request takes alone; None: it is not."""


def round_of(setups: list[list[Request]], chance: random.Random) -> Iterator[list[Turn]]:
    """All requests, setup by setup, and some that are cancelled. The one to four prompts of a batch are queued at once."""
    for requests in chance.sample(setups, len(setups)):
        first, *more = chance.sample(requests, len(requests))
        turns: list[Turn] = [(each, None) for each in more]
        turns += [cancelled(each, chance) for each in requests if chance.random() < CANCELLED]
        turns = [(first, None), *chance.sample(turns, len(turns))]
        while turns:
            (count,) = chance.choices((1, 2, 3, 4), (6, 2, 1, 1))
            yield turns[:count]
            turns = turns[count:]


def cancelled(request: Request, chance: random.Random) -> Turn:
    return request, chance.uniform(0, LATEST)


# What comes of it.


@dataclass(frozen=True)
class Reading:
    """A process with nothing loaded and nothing under way. `held`: bytes without pages of files."""

    role: str
    pid: int
    held: int
    descriptors: int
    threads: int


@dataclass
class Found:
    """`status`: how each prompt ended. `readings`: after each round, which the same ranks live through, and at the end.
    `wrong`: in words."""

    seed: int
    status: list[str] = field(default_factory=list)
    compared: int = 0
    readings: list[list[Reading]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Session:
    """A running ComfyUI that is sent prompts. `base`: its base directory; `temporary`: TMPDIR of it and its ranks.
    `references`: see `compute_references`. `seen`: all its processes so far."""

    server: ComfyUIServer
    base: Path
    temporary: Path
    found: Found
    references: dict[str, tuple[Arrays, float]] = field(default_factory=dict)
    serial: int = 0
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def send(self, request: Request) -> str:
        """Queue it: the prompt's id."""
        self.serial += 1
        return self.server.queue(request.prompt(self.serial))

    def arrays(self, outcome: Outcome, request: Request) -> Arrays:
        """The latent and the images."""
        (file,) = outcome.outputs[request.saved]["latents"]
        latent = load_file(self.base / file["type"] / file["subfolder"] / file["filename"])["latent_tensor"]
        return latent, *(np.array(Image.open(io.BytesIO(image))) for image in outcome.images)

    def compute_references(self, requests: Iterable[Request]) -> dict[str, tuple[Arrays, float]]:
        """Each request alone, by its name, and the seconds that it took: nothing is loaded before it. AssertionError for a
        result that could not show a mistake."""
        for request in requests:
            self.server.run(UNLOAD_PROMPT)
            began = time.monotonic()
            outcome = self.server.wait(self.send(request))
            assert outcome.status == "success", f"{request.name}: {outcome.error}"
            arrays = self.arrays(outcome, request)
            assert np.isfinite(arrays[0]).all(), f"{request.name}: the latent is not finite"
            assert all(array.std() > 0 for array in arrays), f"{request.name}: an image of one colour"
            for name, (other, _) in self.references.items():
                assert not are_equal(arrays, other), f"{request.name} and {name} give the same"
            self.references[request.name] = arrays, time.monotonic() - began
        return self.references

    def batch(self, turns: list[Turn]) -> None:
        sent = [(request, cancel, self.send(request)) for request, cancel in turns]
        for request, cancel, prompt_id in sent:
            if cancel is not None:
                time.sleep(cancel * self.references[request.name][1] / 3)  # most of it was loading
                self.server.post("/interrupt", {"prompt_id": prompt_id} if len(sent) > 1 else {})
            if wrong := self._wrong(request, cancel, self.server.wait(prompt_id)):
                self.found.wrong.append(f"prompt {len(self.found.status)} ({request.name}): {wrong}")
        if (files := len(list(self.temporary.iterdir()))) > 1:
            self.found.wrong.append(f"{files} temporary files or folders at once, although one pool has one")
        self.processes()

    def _wrong(self, request: Request, cancel: float | None, outcome: Outcome) -> str:
        """Empty if the prompt ended as it should."""
        self.found.status.append(outcome.status)
        if outcome.status == "interrupted":
            return "" if cancel is not None else "was cancelled, though it was not asked for"
        if outcome.status != "success":
            return outcome.error
        self.found.compared += 1
        is_right = are_equal(self.arrays(outcome, request), self.references[request.name][0])
        return "" if is_right else "differs from the same request alone"

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """By role: ComfyUI, and the ranks in the order of their numbers."""
        main = psutil.Process(self.server.process.pid)
        found = [("ComfyUI", main), *((f"rank {index}", rank) for index, rank in enumerate(ranks(self.server)))]
        self.seen |= {process.pid: process for process in (main, *main.children(recursive=True))}
        return found

    def empty(self) -> None:
        """Unloads everything by ComfyUI's button and by the node, and reads the processes."""
        self.server.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(FREE_SECONDS)
        outcome = self.server.run(UNLOAD_PROMPT)
        if outcome.status != "success":
            self.found.wrong.append(f"unloading after prompt {len(self.found.status)}: {outcome.error}")
        time.sleep(3 * REST_SECONDS)  # with the time between a step's messages
        readings: list[Reading] = []
        for role, process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # a rank that is just ending
                counts = process.num_fds(), process.num_threads()
                readings.append(Reading(role, process.pid, held_bytes((process.pid,)), *counts))
        self.found.readings.append(readings)


def are_equal(found: Arrays, expected: Arrays) -> bool:
    """Shapes, dtypes and all bits."""
    forms = [[(array.shape, array.dtype, array.tobytes()) for array in arrays] for arrays in (found, expected)]
    return forms[0] == forms[1]


def grown(early: list[Reading], late: list[Reading]) -> Iterator[str]:
    for before in early:
        for after in (each for each in late if each.pid == before.pid):
            if after.held >= (1 + GROWTH) * before.held:
                yield f"{after.role} grew by {100 * (after.held / before.held - 1):.1f} % from {before.held / 1e6:.1f} MB"
            for what in ("descriptors", "threads"):
                count, least = getattr(after, what), getattr(before, what)
                if count > least + MORE:
                    yield f"{after.role} has {count} {what} with nothing loaded, {least} before"


def soak(checkout: Path, prompts: int, seed: int, said: Callable[[str], None]) -> Found:
    """Rounds of all requests on two ranks, then batches that change to other devices and back. A short soak has fewer
    requests, so that each comes back. `said` is called with a line now and then."""
    chance, each, found = random.Random(seed), min(EACH, max(1, prompts // 100)), Found(seed)
    two, other = ([draw(setup, each, seed) for setup in setups] for setups in (TWO_RANKS, OTHER_RANKS))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        base, temporary = Path(folder) / "base", Path(folder) / "temporary"
        temporary.mkdir()
        write_files(base)
        # Nothing kept from prompt to prompt, so that requests are alone; what ComfyUI usually keeps, in the soak.
        with _server(checkout, base, temporary, "--cache-none") as server:
            alone = Session(server, base, temporary, found)
            references = alone.compute_references(request for requests in (*two, *other) for request in requests)
        said(f"{len(references)} requests alone")
        with _server(checkout, base, temporary, "--cache-classic") as server:
            session = Session(server, base, temporary, found, references)
            try:
                batches = list(round_of(two, chance))
                while len(found.status) + sum(map(len, batches)) <= (1 - RESTARTS) * prompts:
                    for batch in batches:
                        session.batch(batch)
                    session.empty()
                    said(f"{len(found.status)}/{prompts} prompts, {len(found.wrong)} wrong")
                    batches = list(round_of(two, chance))
                restarts = 0
                while left := prompts - len(found.status):
                    requests = chance.choice(two if restarts % 2 else other)
                    chosen = chance.choices(requests, k=min(left, chance.randint(2, 4)))
                    session.batch([cancelled(each, chance) if chance.random() < 0.3 else (each, None) for each in chosen])
                    restarts += 1
                session.empty()
            except (RuntimeError, TimeoutError) as error:  # ComfyUI itself is gone, or a prompt hangs
                found.wrong.append(str(error))
            session.processes()
        _, alive = psutil.wait_procs(list(session.seen.values()), timeout=END_SECONDS)
        found.wrong += [f"left: process {process.pid}: {' '.join(process.cmdline())[:200]}" for process in alive]
        found.wrong += [f"left: temporary file {path.name}" for path in sorted(temporary.iterdir())]
    if len(rounds := found.readings[:-1]) > 2:  # what is loaded or compiled at first use is there after the first
        found.wrong += grown(rounds[1], rounds[-1])
    return found


@contextlib.contextmanager
def _server(checkout: Path, base: Path, temporary: Path, cache: str) -> Iterator[ComfyUIServer]:
    """A ComfyUI whose temporary files, and those of its ranks, are in a folder of their own."""
    with (
        mock.patch.dict(os.environ, {"TMPDIR": str(temporary), **FREED_AT_ONCE}),
        ComfyUIServer(checkout, base, find_python(checkout), ("--cpu", cache)) as server,
    ):
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was seen")
    parser.add_argument("--comfyui", type=Path, default=Path(os.environ.get("COMFYUI_PATH") or Path.home() / "ComfyUI"))
    options = parser.parse_args()
    found = soak(options.comfyui, options.prompts, options.seed, print)
    keep(options.out, **asdict(found))
    print(dict(Counter(found.status)), *(found.wrong or ["All well."]), sep="\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
