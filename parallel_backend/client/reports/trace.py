"""The trace of the last run, made from the ranks' timelines: figures as text, and a Chrome trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
CATEGORIES = {WORK: "compute", TRANSFER: "transfer", WAIT: "wait", FETCH: "wait for weights"}


def to_spans(timeline: Timeline, zero: float) -> np.ndarray:
    """Return the timeline as SPAN [n], sorted by start, in seconds after `zero`."""
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
    where: str
    """The rank's device, and its position on the mesh axes, as text."""
    spans: np.ndarray
    """SPAN [n], sorted by start."""
    lost: int
    """Number of older spans that were dropped."""

    def of(self, *kinds: int) -> np.ndarray:
        """Return the spans of these kinds."""
        return self.spans[np.isin(self.spans["kind"], kinds)]

    @property
    def computing(self) -> float:
        """Seconds of micro-steps in which the rank did not wait."""
        waits = self.of(WAIT, FETCH)
        return total(self.of(WORK)) - total(waits[waits["step"] != 0])


def hidden_share(ranks: Sequence[RankTrace]) -> float | None:
    """Return the fraction of these ranks' transfer time in which a rank did not wait. None without transfers."""
    under_way = sum(total(rank.of(TRANSFER)) for rank in ranks)
    return 1 - sum(total(rank.of(WAIT)) for rank in ranks) / under_way if under_way else None


@dataclass(frozen=True)
class Trace:
    """A run on all ranks. `str` gives the figures as text."""

    model: str
    degrees: Degrees
    ranks: tuple[RankTrace, ...]
    zero: float
    """time.perf_counter at the run's first span. All times are relative to it."""

    @property
    def seconds(self) -> float:
        """Seconds from the first span's start to the last span's end."""
        return max(float(rank.spans["stop"].max()) for rank in self.ranks if len(rank.spans))

    @property
    def hidden(self) -> float | None:
        return hidden_share(self.ranks)

    def __str__(self) -> str:
        mode = f" ({self.degrees.patch_mode})" if self.degrees.patch > 1 else ""
        lines = [f"{self.model}, {self.degrees}{mode}: {self.seconds:.3f} s from the first micro-step to the last"]
        if self.hidden is not None:
            lines.append(f"{100 * self.hidden:.0f} % of the transfers' time was hidden behind computing")
        for rank in self.ranks:
            waiting, fetching = total(rank.of(WAIT)), total(rank.of(FETCH))
            parts = {"computing": rank.computing, "waiting": waiting}
            parts |= {"waiting for weights": fetching} if fetching else {}
            parts["idle"] = self.seconds - sum(parts.values())
            text = ", ".join(f"{name} {part:.3f} s ({100 * part / self.seconds:.0f} %)" for name, part in parts.items())
            hidden = hidden_share((rank,))
            of_transfers = "no transfers" if hidden is None else f"{100 * hidden:.0f} % of its transfers' time hidden"
            lines.append(f"rank {rank.rank} ({rank.where}): {len(rank.of(WORK))} micro-steps, {text}, {of_transfers}")
            if rank.lost:
                lines.append(f"rank {rank.rank}: {rank.lost} earlier spans were not kept, so its figures are about the rest")
        return "\n".join(lines)


def read_trace(model: RemoteTransformer, poll: Poll) -> Trace:
    """Return the trace of the last run. Raises ValueError if nothing has run since the model was loaded."""
    timelines = model.timeline(poll)
    starts = [float(timeline.times.min()) for timeline in timelines if len(timeline.times)]
    if not starts:
        raise nothing_has_run()
    zero = min(starts)
    ranks = tuple(
        RankTrace(
            timeline.rank,
            ", ".join(filter(None, (model.pool.devices[timeline.rank], place(model.degrees, timeline.rank)))),
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
    """Return the rank's coordinate as text, such as 'stage 1 of 2, ulysses 2 of 2'."""
    at = degrees.coordinate(rank)
    names = {"pipe": "stage", "batch": "copy"}
    parts = [(names.get(axis, axis), getattr(at, axis), getattr(degrees, axis)) for axis in AXES]
    return ", ".join(f"{name} {index + 1} of {size}" for name, index, size in parts if size > 1)


def lanes(spans: np.ndarray) -> list[int]:
    """For each span, in order of start, the lowest lane that is free at that time."""
    ends: list[float] = []
    taken = []
    for start, stop in zip(spans["start"], spans["stop"], strict=True):
        lane = next((index for index, end in enumerate(ends) if end <= start), len(ends))
        ends[lane : lane + 1] = [stop]
        taken.append(lane)
    return taken


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Return the events of the Trace Event Format. Each rank is a process: one thread shows micro-steps with their waits,
    the others show transfers, which may overlap."""
    events: list[dict[str, Any]] = []

    def name(what: str, rank: int, thread: int, text: str) -> None:
        events.append({"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": text}})

    for rank in trace.ranks:
        name("process_name", rank.rank, 0, f"rank {rank.rank} ({rank.where})")
        name("thread_name", rank.rank, 0, "micro-steps")
        transfers = rank.of(TRANSFER)
        taken = lanes(transfers)
        for lane in range(max(taken, default=-1) + 1):
            name("thread_name", rank.rank, lane + 1, "transfers")
        inside = rank.of(WORK, WAIT, FETCH)
        for span, thread in (*zip(inside, [0] * len(inside), strict=True), *zip(transfers, taken, strict=True)):
            kind, start, stop = int(span["kind"]), *(round(float(span[end]) * MICROSECONDS, 3) for end in ("start", "stop"))
            text = ("exact" if span["exact"] else "patch") if kind == WORK else CATEGORIES[kind]
            event: dict[str, Any] = {"ph": "X", "name": text, "cat": CATEGORIES[kind], "pid": rank.rank}
            event |= {"tid": thread + (kind == TRANSFER), "ts": start, "dur": round(stop - start, 3)}
            if span["step"]:
                event["args"] = {"micro-step": int(span["step"]), "tokens": [int(span["first"]), int(span["last"])]}
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
