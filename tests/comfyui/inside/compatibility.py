"""Nodes of ComfyUI and of other packs between loader and sampler: native, then with our loader. Run by serve.py.

`prepare` is run in the process that forks, once, and says which nodes there are. `trials` runs them, one after the other,
in ComfyUI's executor, and writes a line of JSON to `progress` when it begins and when it ends with each: whoever reads that
knows where a process died.
"""

import asyncio
import faulthandler
import json
import logging
import math
import random
import re
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import execution
import node_graphs
import numpy
import stand_ins
from boot import PACK, Results, load_pack, other_attention, torch
from node_graphs import GIVEN, Missing
from server import PromptServer
from small_cases import detecting
from templates import load_native

import nodes

SUSPECT = 5e-5
"""From this difference on the native model is tried with another attention kernel, for what rounding does."""
SHORT = '{"steps": 1}'
"""Settings of the next prompt."""


class Failed(Exception):
    """A prompt that ended in an error: `as_json`."""

    def __init__(self, data: dict[str, Any]):
        frames = data.get("traceback") or ()
        self.as_json = {
            "node": data.get("node_type", ""),
            "type": data.get("exception_type", "interrupted"),
            "text": (data.get("exception_message") or "").strip(),
            "ours": bool(frames) and any(f'"{PACK / room}' in frames[-1] for room in ("nodes", "parallel_backend")),
            "traceback": "".join(frames[-4:]),
        }
        super().__init__(self.as_json["text"])


def prepare(results: Results, packs: list[str]) -> None:
    """Case "nodes": pack -> node -> what it is, and "failed": pack -> why it could not be loaded. "core" is ComfyUI."""
    server = PromptServer(asyncio.new_event_loop())
    server.prompt_queue = execution.PromptQueue(server)
    own = set(nodes.NODE_CLASS_MAPPINGS)
    asyncio.run(nodes.init_builtin_extra_nodes())
    core = {name for name in nodes.NODE_CLASS_MAPPINGS if name not in own or not _of_a_pack(name)}
    found, failed = {"core": _described(core)}, {}
    for folder in packs:
        before, told = dict(nodes.NODE_CLASS_MAPPINGS), _Told()
        logging.getLogger().addHandler(told)
        try:
            load_pack(Path(folder))
        except AssertionError:
            reason = told.last.strip().splitlines()[-1].rpartition("custom nodes: ")[2]
            failed[Path(folder).name] = re.sub(r" ?\(/.*?\)", "", reason)
        finally:
            logging.getLogger().removeHandler(told)
        added = {name for name, kind in nodes.NODE_CLASS_MAPPINGS.items() if kind is not before.get(name)}
        found[Path(folder).name] = _described(added)
    results.case("nodes", lambda: found)
    results.case("failed", lambda: failed)


class _Told(logging.Handler):
    """Keeps the last warning."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and record.getMessage().startswith("Cannot import"):
            self.last = record.getMessage()


def _of_a_pack(name: str) -> bool:
    return str(getattr(nodes.NODE_CLASS_MAPPINGS[name], "RELATIVE_PYTHON_MODULE", "")).startswith("custom_nodes")


def _described(names: set[str]) -> dict[str, dict[str, str]]:
    """Those that are tried, in the order of their names: kind, title, the name of the class."""
    found = {}
    for name in sorted(names):
        if (kind := node_graphs.kind_of(name)) is not None:
            own, title = nodes.NODE_CLASS_MAPPINGS[name].__name__, nodes.NODE_DISPLAY_NAME_MAPPINGS.get(name) or name
            found[name] = {"kind": kind, "title": title, "own": own}
    return found


class Trials:
    """The files of a model, in one mode: see `node_graphs.source`."""

    def __init__(self, model: str, mode: str, expected: Path):
        self.case, self.mode, self.expected = stand_ins.Case(model), mode, expected
        self.latent_format = load_native(f"{model}.safetensors").model.latent_format
        node_graphs.install(self.case, self.latent_format)

    def native(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keeps what the node natively gives."""
        expected = self.execute(request, "native")
        path = self.expected / f"{request['key']}.pt"
        torch.save(expected, path)
        effect = None
        if request["kind"] == "model":
            effect = relative(self.plain(json.dumps(request.get("settings", {}))), expected)
        return {"finite": bool(expected.isfinite().all()), "shape": list(expected.shape), "effect": effect}

    @cache  # noqa: B019 (as long as the process)
    def plain(self, settings: str = "{}") -> torch.Tensor:
        """Natively, without a node."""
        return self.execute({"kind": "model", "settings": json.loads(settings)}, "native")

    def ours(self, request: dict[str, Any]) -> dict[str, Any]:
        """Against what `native` kept."""
        expected = torch.load(self.expected / f"{request['key']}.pt")
        GIVEN.wrappers.clear()
        found = self.execute(request, self.mode)
        result = {"difference": relative(expected, found), "psnr": psnr(expected, found)}
        reports = [wrapper.last for wrapper in GIVEN.wrappers if wrapper.last is not None]
        if reports:
            last = reports[-1]
            result |= {"whole": last.reason, "bands": last.bands, "calls": last.calls}
        if result["difference"] > SUSPECT and self.mode != "one warm-up":
            result["itself"] = relative(expected, self.execute(request, "native", other_attention))
        return result

    def after(self) -> dict[str, Any]:
        """The next prompt, of no such node, on the same ranks."""
        mode = "full warm-up" if self.mode == "one warm-up" else self.mode
        return {
            "difference": relative(self.plain(SHORT), self.execute({"kind": "model", "settings": json.loads(SHORT)}, mode))
        }

    def execute(self, request: dict[str, Any], mode: str, change: Callable = lambda model: model) -> torch.Tensor:
        """What the graph with this node gives. Failed; Missing."""
        GIVEN.change = change
        prompt = node_graphs.graph(request, self.case.name, mode)
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        GIVEN.result = None
        server = PromptServer.instance
        executor = execution.PromptExecutor(server, cache_args={"ram": 0, "ram_inactive": 0, "lru": 0})
        executor.execute(prompt, "trial", {}, ["result"])
        if not executor.success:
            (data,) = [
                data for event, data in executor.status_messages if event in ("execution_error", "execution_interrupted")
            ]
            raise Failed(data)
        assert GIVEN.result is not None, "the graph gave nothing"
        return GIVEN.result


def relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Largest difference, of the largest value. Infinite for NaN and for another shape; equal NaNs are no difference."""
    if expected.shape != found.shape:
        return math.inf
    apart = torch.where(expected.isnan() & found.isnan(), 0.0, (expected - found).abs())
    return float(torch.nan_to_num(apart, nan=math.inf).max() / expected.abs().nan_to_num().max().clamp_min(1e-9))


def psnr(expected: torch.Tensor, found: torch.Tensor) -> float | None:
    """dB of the range of values."""
    if expected.shape != found.shape or not found.isfinite().all():
        return None
    error = float((expected - found).square().mean().sqrt())
    return 200.0 if error == 0 else 20 * math.log10(float(expected.max() - expected.min()) / error)


def trials(
    model: str, mode: str, requests: list[dict[str, Any]], progress: str, expected: str, budget: float, limit: float
) -> None:
    """Each line of `progress` has "key", "mode" and "begun" or the outcome. Ends early after `budget` seconds, and where a
    trial left something behind; a trial of more than `limit` seconds ends the process."""
    if mode == "native":  # compiled or not, it gives the same
        torch.compile = lambda model=None, **_named: model if model is not None else lambda function: function
    started = time.monotonic()
    with open(progress, "a") as lines, detecting(stand_ins.Case(model).settings["detected"]):
        trial = Trials(model, mode, Path(expected))
        trial.plain(SHORT)
        for request in requests:
            if time.monotonic() - started > budget:
                return

            def tell(request=request, **said: Any) -> None:
                print(json.dumps({"key": request["key"], "mode": mode, **said}), file=lines, flush=True)

            tell(begun=True)
            faulthandler.dump_traceback_later(limit, exit=True)
            began = time.monotonic()
            outcome = attempt(lambda request=request: (trial.native if mode == "native" else trial.ours)(request))
            tell(outcome=outcome, seconds=round(time.monotonic() - began, 2))
            after = attempt(trial.after)
            faulthandler.cancel_dump_traceback_later()
            tell(after=after)
            if after.get("difference", math.inf) > SUSPECT:
                return


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its result, or {"error": ...}, or {"missing": what nothing stands in for}."""
    try:
        with torch.inference_mode():
            return run()
    except Missing as missing:
        return {"missing": str(missing)}
    except Failed as failed:
        return {"error": failed.as_json}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"error": {"node": "", "type": "campaign", "text": text, "ours": False, "traceback": traceback.format_exc()}}


def main(results: Results, packs: list[str] | None = None, **task: Any) -> None:
    if packs is not None:
        prepare(results, packs)
    else:
        trials(**task)
