"""Kinds of cases that need a real ComfyUI: LoRA files, widget values of workflows, bodies of requests."""

import io
import json
import random
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file

from parallel_backend.quickstart.model import WEIGHTS
from scripts.comfyui_server import ComfyUIServer, Outcome
from testing.comfyui.scripted import FORKED_RANKS, ComfyUI, Inside
from tests.comfyui.graph import Graph

from . import loras, requests
from .verdict import CLOSE, Tally, Told, fault_of

SCRIPTS = Path(__file__).parent / "inside"
BATCH = 100
"""LoRA files for one process of ComfyUI."""
ROUTE = "/parallel_dit/plan"
LORA, WORKFLOWS, BODIES = "LoRA", "workflows", "bodies"
OTHER_INPUTS = ("positive, negative", "control_net")
OF_A_RANK = re.compile(r"\branks? \d")
LEVELS = 2
"""Of 255, by which pictures may differ that are rounded to whole ones."""
REQUEST_SECONDS = 120


def run_loras(
    comfyui: ComfyUI, base: Path, count: int, seed: int, told: Told = lambda number, text: None, first: int = 0
) -> Tally:
    """Case `first` and those behind it. `base`: an empty base directory for ComfyUI."""
    tally, folder = Tally(LORA), base / "models" / "loras"
    folder.mkdir(parents=True)
    loras.save_model(base / "models" / "diffusion_models")
    for begin in range(first, first + count, BATCH):
        numbers = range(begin, min(begin + BATCH, first + count))
        files = [loras.make(random.Random(f"{seed} {LORA} {number}"), folder, number) for number in numbers]
        inside = Inside(comfyui, base, SCRIPTS)
        try:
            found = inside.run("lora_files", model=loras.MODEL, files=[(each.file, each.strength) for each in files])[0]
        finally:
            inside.close()
        for number, lora in zip(numbers, files, strict=True):
            judge_lora(tally, number, found[lora.file])
            if number in tally.defects:
                told(number, tally.defects[number])
        if found["as before"] != 0.0:
            tally.wrong[numbers[-1]] = f"the model without LoRA is another one afterwards: {found['as before']}"
    return tally


def judge_lora(tally: Tally, number: int, found: dict[str, Any]) -> None:
    """`found`: see inside/lora_files.py."""
    text = found.get("text", "")
    tally.slowest = max(tally.slowest, (found.get("seconds", 0.0), number))
    tally.largest = max(tally.largest, (found.get("bytes", 0), number))
    if "error" in found:
        tally.outcomes["unnamed"] += 1
        tally.unnamed[number] = found["traceback"][-800:]
    elif found.get("rank") or not found["lives"]:
        tally.outcomes["rank ended"] += 1
        tally.ended[number] = text[-800:] or "the ranks are others"
    elif text and found["kind"] != "ValueError" and found.get("theirs", "").startswith(f"{found['kind']}: "):
        tally.outcomes["refused by ComfyUI"] += 1
    elif text and found["not finite"]:
        note(tally, number, text, "run, not finite, and named", "", "")
    elif text:
        named = found["kind"] == "ValueError" and text.startswith(("model: ", "model_name: "))
        note(tally, number, text, "refused", "" if named else f"names no widget: {found['kind']}", found["cause"])
    elif found.get("far") is None:
        tally.outcomes["run"] += 1
    elif found["far"] < CLOSE:
        tally.outcomes["run, and right"] += 1
    else:
        tally.outcomes["run, and wrong"] += 1
        tally.wrong[number] = f"off by {found['far']:.3g}, values up to {found['most']:.3g}"


def note(tally: Tally, number: int, text: str, outcome: str, wrong: str, cause: str) -> None:
    """An error with the words `text`. `wrong`: what is known to be wrong with it."""
    tally.longest = max(tally.longest, (len(text), number))
    if wrong := wrong or fault_of(text, cause):
        tally.outcomes["unnamed"] += 1
        tally.unnamed[number] = f"{wrong}: {text[:400]!r}"
    else:
        tally.outcomes[outcome] += 1


class Host:
    """A server that is sent what nobody should send."""

    def __init__(self, server: ComfyUIServer):
        self._server = server
        self._process = psutil.Process(server.process.pid)
        self._inputs = {
            name: [*info["input"].get("required", {}), *info["input"].get("optional", {})]
            for name, info in server.object_info().items()
        }
        self._picture = self._sound(0)

    def workflows(self, count: int, seed: int, told: Told = lambda number, text: None, first: int = 0) -> Tally:
        tally = Tally(WORKFLOWS)
        for number in range(first, first + count):
            workflow = requests.workflow(random.Random(f"{seed} {WORKFLOWS} {number}"))
            begun = time.monotonic()
            try:
                outcome = self._server.run(workflow.prompt, REQUEST_SECONDS)
            except urllib.error.HTTPError as error:
                tally.outcomes[f"refused by ComfyUI ({error.code})"] += 1
            else:
                if outcome.status == "refused":
                    tally.outcomes["refused by ComfyUI"] += 1
                else:
                    self._judge(tally, number, workflow, outcome)
            tally.slowest = max(tally.slowest, (time.monotonic() - begun, number))
            if number in tally.defects:
                told(number, f"{workflow.changed}: {tally.defects[number]}")
        if (far := self._far(self._sound(1))) > LEVELS:
            tally.wrong[first + count - 1] = f"a sound workflow gives another picture afterwards, off by {far} levels"
        return tally

    def _judge(self, tally: Tally, number: int, workflow: requests.Workflow, outcome: Outcome) -> None:
        if outcome.status == "success":
            far = self._far(outcome) if workflow.picture == requests.EXACT else 0
            tally.outcomes["run" if workflow.picture == requests.CLOSE else "run, and right"] += far <= LEVELS
            if far > LEVELS:
                tally.outcomes["run, and wrong"] += 1
                tally.wrong[number] = f"off by {far} levels with other {workflow.changed}"
            return
        node, _, text = outcome.error.partition(": ")
        inputs = [name for each in workflow.prompt.values() for name in self._inputs[each["class_type"]]]
        names = "|".join(map(re.escape, (*inputs, *OTHER_INPUTS)))
        named = re.match(rf"({names})(: | is | names | needs )", text)
        if OF_A_RANK.search(text) and not named:
            tally.outcomes["rank ended"] += 1
            tally.ended[number] = text[:800]
            return
        wrong = "" if named else f"{node} names no widget"
        note(tally, number, text, "refused", wrong, "")

    def _sound(self, serial: int) -> Outcome:
        """Sampled anew for each `serial`."""
        graph = Graph()
        model = graph.add("ParallelDiTLoader", **requests.LOADER)
        latent = graph.ksampler(model, graph.empty(requests.SIZE), steps=requests.STEPS, denoise=1.0 - 1e-9 * serial)
        graph.add("PreviewImage", images=graph.add("QuickstartDecode", samples=latent))
        outcome = self._server.run(graph.prompt)
        assert outcome.status == "success", outcome.error
        return outcome

    def _far(self, outcome: Outcome) -> int:
        """Levels between the sound picture and the one of its size, beside which a trace may be."""
        sound = _pixels(self._picture.images[0])
        found = [each for each in map(_pixels, outcome.images) if each.shape == sound.shape]
        return int(np.abs(found[0] - sound).max()) if found else 255

    def bodies(self, count: int, seed: int, told: Told = lambda number, text: None, first: int = 0) -> Tally:
        tally = Tally(BODIES)
        for number in range(first, first + count):
            body = requests.body(random.Random(f"{seed} {BODIES} {number}"))
            before, begun = self._process.memory_info().rss, time.monotonic()
            status, reply = self._post(body)
            tally.slowest = max(tally.slowest, (time.monotonic() - begun, number))
            tally.largest = max(tally.largest, (self._process.memory_info().rss - before, number))
            judge_reply(tally, number, status, reply)
            if number in tally.defects:
                told(number, tally.defects[number])
        return tally

    def _post(self, body: bytes) -> tuple[int, bytes]:
        address = f"http://127.0.0.1:{self._server.port}{ROUTE}"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=REQUEST_SECONDS) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def judge_reply(tally: Tally, number: int, status: int, reply: bytes) -> None:
    if status == 413:  # ComfyUI's own limit
        tally.outcomes["refused by ComfyUI"] += 1
        return
    try:
        answer = json.loads(reply)
        texts = [answer["error"]] if status == 400 else [answer["why"], *(each["why"] for each in answer["loaders"])]
    except (ValueError, LookupError, TypeError):
        note(tally, number, f"{status}: {reply[:200]!r}", "", "no answer", "")
        return
    wrong = "" if status == 200 or texts[0].startswith("loaders: ") else "names no field"
    note(tally, number, max(texts, key=len), "refused" if status == 400 else "answered", wrong, "")


def _pixels(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), dtype=np.int16)


def server_of(comfyui: ComfyUI, base: Path) -> ComfyUIServer:
    """Not started. `base`: an empty base directory, which gets files to choose from."""
    models = base / "models" / "diffusion_models"
    models.mkdir(parents=True)
    whole = WEIGHTS.read_bytes()
    (models / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (models / requests.COPY).write_bytes(whole)
    save_file({"encoder.conv_in.weight": torch.zeros(4, 3, 3, 3)}, models / "vae.safetensors")
    return ComfyUIServer(comfyui.checkout, base, comfyui.python, packs=(FORKED_RANKS,), folder="parallel-dit")
