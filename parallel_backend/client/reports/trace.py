"""The trace of the last run, made from the ranks' timelines: figures as text, and a Chrome trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import AXES, WIDGETS, Degrees
from parallel_backend.processes.pool import Poll
from parallel_backend.wire.diagnosis import Timeline
from parallel_backend.wire.timeline_kinds import FETCH, TRANSFER, WAIT, WORK

LABELS = ("kind", "step", "first", "last", "exact")
SPAN = np.dtype([("start", "f8"), ("stop", "f8"), *((name, "i8") for name in LABELS)])
"""A span: start and stop in seconds, kind and StepLabel (timeline_kinds.py). `step` is 0 outside of micro-steps."""

MICROSECONDS = 1e6


def to_spans(timeline: Timeline, zero: float) -> np.ndarray:
    """SPAN [n], sorted by start, in seconds after `zero`."""
    spans = np.empty(len(timeline.times), SPAN)
    spans["start"], spans["stop"] = (timeline.times.numpy() - zero).T
    for name, column in zip(LABELS, timeline.labels.numpy().T, strict=True):
        spans[name] = column
    return spans[np.argsort(spans["start"], kind="stable")]


def total(spans: np.ndarray) -> float:
    """Sum of the spans' seconds."""
    return float((spans["stop"] - spans["start"]).sum())


@dataclass(frozen=True)
class RankTrace:
    """One rank's spans. Spans of a kind do not overlap, except transfers."""

    rank: int
    device: str
    place: str
    """The rank's position on the mesh axes as text. Empty for a single rank."""
    spans: np.ndarray
    """SPAN [n], sorted by start."""
    lost: int
    """Number of older spans that were not kept."""

    @property
    def where(self) -> str:
        return ", ".join(filter(None, (self.device, self.place)))

    @cached_property
    def work(self) -> np.ndarray:
        return self.spans[self.spans["kind"] == WORK]

    @cached_property
    def transfers(self) -> np.ndarray:
        return self.spans[self.spans["kind"] == TRANSFER]

    @cached_property
    def waits(self) -> np.ndarray:
        return self.spans[self.spans["kind"] == WAIT]

    @cached_property
    def fetches(self) -> np.ndarray:
        """Waits for weights from host memory."""
        return self.spans[self.spans["kind"] == FETCH]

    @cached_property
    def computing(self) -> np.ndarray:
        """The parts of `work` in which the rank did not wait."""
        inside = self.spans[np.isin(self.spans["kind"], (WAIT, FETCH)) & (self.spans["step"] != 0)]
        pieces = np.empty(len(self.work) + len(inside), SPAN)
        starts = np.concatenate((self.work["start"], inside["stop"]))
        order = np.argsort(starts, kind="stable")
        pieces[:] = np.concatenate((self.work, inside))[order]
        pieces["start"], pieces["stop"] = starts[order], np.sort(np.concatenate((self.work["stop"], inside["start"])))
        pieces["kind"] = WORK
        return pieces

    @property
    def hidden(self) -> float | None:
        """Share of the transfers' time in which the rank did not wait. None without transfers."""
        return hidden_share((self,))


def hidden_share(ranks: Sequence[RankTrace]) -> float | None:
    """Share of the transfers' time, over all these ranks, in which a rank did not wait. None without transfers."""
    under_way = sum(total(rank.transfers) for rank in ranks)
    return 1 - sum(total(rank.waits) for rank in ranks) / under_way if under_way else None


@dataclass(frozen=True)
class Trace:
    """A run on all ranks. `str` gives the figures as text."""

    model: str
    degrees: Degrees
    ranks: tuple[RankTrace, ...]
    zero: float
    """time.perf_counter at the run's first span, from which all times count."""

    @property
    def title(self) -> str:
        mode = f" ({self.degrees.patch_mode})" if self.degrees.patch > 1 else ""
        return f"{self.model}, {self.degrees}{mode}"

    @cached_property
    def seconds(self) -> float:
        """Time from the first span's start to the last span's end."""
        return max(float(rank.spans["stop"].max()) for rank in self.ranks if len(rank.spans))

    @property
    def hidden(self) -> float | None:
        return hidden_share(self.ranks)

    @cached_property
    def bands(self) -> np.ndarray:
        """First token of each band, ascending. Empty if all micro-steps were exact."""
        return np.unique(np.concatenate([rank.work["first"][rank.work["exact"] == 0] for rank in self.ranks]))

    def band(self, spans: np.ndarray) -> np.ndarray:
        """int [n]: band of each span; -1 for exact micro-steps."""
        return np.where(spans["exact"] == 1, -1, np.searchsorted(self.bands, spans["first"]))

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.seconds:.3f} s from the first micro-step to the last"]
        if self.hidden is not None:
            lines.append(f"{100 * self.hidden:.0f} % of the transfers' time was hidden behind computing")
        for rank in self.ranks:
            computing, waiting = total(rank.computing), total(rank.waits)
            fetching = total(rank.fetches)
            parts = {"computing": computing, "waiting": waiting}
            parts |= {"waiting for weights": fetching} if len(rank.fetches) else {}
            parts["idle"] = self.seconds - computing - waiting - fetching
            text = ", ".join(f"{name} {part:.3f} s ({100 * part / self.seconds:.0f} %)" for name, part in parts.items())
            hidden = "no transfers" if rank.hidden is None else f"{100 * rank.hidden:.0f} % of its transfers' time hidden"
            lines.append(f"rank {rank.rank} ({rank.where}): {len(rank.work)} micro-steps, {text}, {hidden}")
            if rank.lost:
                lines.append(f"rank {rank.rank}: {rank.lost} earlier spans were not kept, so its figures are about the rest")
        return "\n".join(lines)


def read_trace(model: RemoteTransformer, poll: Poll) -> Trace:
    """The trace of the last run. ValueError if nothing has run since the model was loaded."""
    timelines = model.timeline(poll)
    starts = [float(timeline.times.min()) for timeline in timelines if len(timeline.times)]
    if not starts:
        raise nothing_has_run()
    zero = min(starts)
    ranks = tuple(
        RankTrace(
            timeline.rank,
            model.pool.devices[timeline.rank],
            place(model.degrees, timeline.rank),
            to_spans(timeline, zero),
            timeline.lost,
        )
        for timeline in timelines
    )
    return Trace(model.checkpoint.path.stem, model.degrees, ranks, zero)


def nothing_has_run() -> ValueError:
    return ValueError(
        "after: nothing has run on Parallel DiT's ranks yet, so there is no timeline. First run a sampler with a MODEL "
        "from Parallel DiT Loader, and connect its output to after."
    )


def place(degrees: Degrees, rank: int) -> str:
    """The rank's coordinate in words, such as 'stage 1 of 2, ulysses 2 of 2'."""
    at = degrees.coordinate(rank)
    names = {"pipe": "stage", "batch": "copy"}
    parts = [(names.get(axis, axis), getattr(at, axis), getattr(degrees, axis)) for axis in AXES]
    return ", ".join(f"{name} {index + 1} of {size}" for name, index, size in parts if size > 1)


def lanes(spans: np.ndarray) -> list[int]:
    """Lane of each span, by start: the lowest lane without a span at that time."""
    ends: list[float] = []
    taken = []
    for start, stop in zip(spans["start"], spans["stop"], strict=True):
        lane = next((index for index, end in enumerate(ends) if end <= start), len(ends))
        ends[lane : lane + 1] = [stop]
        taken.append(lane)
    return taken


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Events of the Trace Event Format.

    Each rank is a process: one thread shows micro-steps with their waits, the others the transfers, which may overlap.
    """
    events: list[dict[str, Any]] = []

    def name(what: str, rank: int, thread: int, text: str) -> None:
        events.append({"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": text}})

    first = min((int(rank.work["step"].min()) for rank in trace.ranks if len(rank.work)), default=0)
    for rank in trace.ranks:
        number = rank.rank
        name("process_name", number, 0, f"rank {number} ({rank.where})")
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}})
        name("thread_name", number, 0, "micro-steps")
        taken = lanes(rank.transfers)
        for lane in range(max(taken, default=-1) + 1):
            name("thread_name", number, lane + 1, f"transfers {lane + 1}" if lane else "transfers")
        bands = trace.band(rank.work)
        titles = ["exact" if band < 0 else f"patch {band}" for band in bands]
        for spans, category, threads, texts in (
            (rank.work, "compute", [0] * len(rank.work), titles),
            (rank.waits, "wait", [0] * len(rank.waits), ["wait"] * len(rank.waits)),
            (rank.fetches, "wait", [0] * len(rank.fetches), ["wait for weights"] * len(rank.fetches)),
            (rank.transfers, "transfer", [lane + 1 for lane in taken], ["transfer"] * len(rank.transfers)),
        ):
            for span, thread, text in zip(spans, threads, texts, strict=True):
                start, stop = (round(float(span[end]) * MICROSECONDS, 3) for end in ("start", "stop"))
                event: dict[str, Any] = {"ph": "X", "name": text, "cat": category, "pid": number, "tid": thread}
                event |= {"ts": start, "dur": round(stop - start, 3)}
                if span["step"]:
                    tokens = [int(span["first"]), int(span["last"])]
                    event["args"] = {"micro-step": int(span["step"]) - first, "tokens": tokens}
                events.append(event)
    return events


def write_chrome_trace(trace: Trace, path: Path) -> None:
    """Write a file for chrome://tracing and ui.perfetto.dev."""
    widgets = {WIDGETS[axis]: getattr(trace.degrees, axis) for axis in AXES}
    content = {
        "traceEvents": chrome_events(trace),
        "displayTimeUnit": "ms",
        "otherData": {"model": trace.model, "hidden share of transfers": trace.hidden, **widgets},
    }
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
