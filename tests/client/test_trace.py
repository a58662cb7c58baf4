"""The last run's timeline: what ranks record agrees with what they report, and what is written is that."""

import json
import time
from itertools import count

import numpy as np
import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.client.reports.trace import Trace, read_trace, total, write_chrome_trace
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm.recorder import Recorder
from parallel_backend.wire.timeline_kinds import FETCH, OUTSIDE, TRANSFER, WAIT, WORK
from testing import mini
from testing.models import nobody

STEPS = 4
DISPLACED = Degrees(patch=2, patch_mode="displaced")
MODES = {
    "pipe": (Degrees(pipe=2), 3),
    "displaced": (DISPLACED, 1),
    "pipe x ulysses": (Degrees(pipe=2, ulysses=2), 2),
    "one rank": (Degrees(), 1),
}


def run(model, bands: int, steps: int = STEPS) -> tuple[Trace, RunReport, tuple[float, float]]:
    """One run's trace, its report, and when it began and was over."""
    model.close_run(model.open_run(), nobody)  # what earlier tests did is in the first report
    x, _, tensors = mini.inputs()
    started = time.perf_counter()
    model.begin_timeline()
    stats = sample_in_bands(model, x, linear_sigmas(steps), Prompt(tensors, {}, 1.0), bands, 1)[1]
    stopped = time.perf_counter()
    report = RunReport(model.degrees, bands, steps, stopped - started, None, None, tuple(stats))
    return read_trace(model, nobody), report, (started, stopped)


@pytest.fixture(scope="module", params=MODES)
def ran(request, remote):
    degrees, bands = MODES[request.param]
    return run(remote(degrees), bands)


def test_sums_are_those_of_the_report(ran):
    trace, report, _ = ran
    for rank, stats in zip(trace.ranks, report.ranks, strict=True):
        assert len(rank.of(WORK)) == stats.micro_steps > 0
        assert rank.lost == 0
        # Times since the machine's start are rounded to less than a microsecond here.
        near = lambda seconds: pytest.approx(seconds, abs=1e-4)  # noqa: E731
        assert rank.computing == near(stats.compute_seconds)
        assert total(rank.of(TRANSFER)) == near(stats.transfer_seconds)
        assert total(rank.of(WAIT)) == near(stats.wait_seconds)
    said = f"{100 * trace.hidden:.0f} % of the transfers' time was hidden" if trace.hidden is not None else "moved"
    assert said in str(report)
    if trace.hidden is not None:
        assert said in str(trace)


def test_waits_lie_in_transfers(ran):
    trace, _, _ = ran
    for rank in trace.ranks:
        waits, transfers = rank.of(WAIT), rank.of(TRANSFER)
        assert len(waits) == len(transfers)
        ends = {round(stop, 9): start for start, stop in zip(transfers["start"], transfers["stop"], strict=True)}
        assert all(ends[round(wait["stop"], 9)] <= wait["start"] for wait in waits)


def test_only_the_last_run_is_shown(remote):
    model = remote(Degrees(pipe=2))
    x, _, tensors = mini.inputs()
    prompt = Prompt(tensors, {}, 1.0)

    def sample(steps: int) -> list[int]:
        sample_whole(model, x, linear_sigmas(steps), prompt)
        return [len(rank.of(WORK)) for rank in read_trace(model, nobody).ranks]

    model.begin_timeline()
    assert sample(3) == [6, 6]
    assert sample(2) == [10, 10]  # nobody said that another run began
    began = time.perf_counter()
    model.begin_timeline()
    assert sample(1) == [2, 2]
    assert read_trace(model, nobody).zero >= began  # not even the end of a send from before


def test_where_nothing_has_run_it_says_so(remote):
    model = remote(Degrees(pipe=2), fresh=True)
    with pytest.raises(ValueError, match=r"^after: nothing has run .* First run a sampler"):
        read_trace(model, nobody)
    x, timestep, tensors = mini.inputs()
    model.predict(ModelCall(x, timestep, tensors), nobody)
    assert len(read_trace(model, nobody).ranks) == 2
    model.begin_timeline()
    with pytest.raises(ValueError, match=r"^after: "):
        read_trace(model, nobody)


class Short(Recorder):
    CAPACITY, UNREAD, BATCH = 8, 4, 2


def test_the_ring_keeps_the_newest_and_counts_the_others():
    recorder = Short(None)
    assert recorder.read()[0].shape == (0, 2)
    for number in range(5):
        recorder.add(WORK, (number, 0, 4, 1), float(number), number + 0.5)
    times, labels, lost = recorder.read()
    assert (len(times), lost) == (5, 0)
    for number in range(5, 20):
        recorder.add(WORK, (number, 0, 4, 1), float(number), number + 0.5)
    times, labels, lost = recorder.read()
    assert times.tolist() == [[number, number + 0.5] for number in range(12, 20)]
    assert labels.tolist() == [[WORK, number, 0, 4, 1] for number in range(12, 20)]
    assert (times.dtype, labels.dtype, lost) == (torch.float64, torch.int64, 12)
    recorder.restart()
    assert (len(recorder.read()[0]), recorder.read()[2], recorder.step) == (0, 0, OUTSIDE)
    assert (recorder.drain(WORK), recorder.drain(WORK), recorder.drain(WAIT)) == (20 * 0.5, 0.0, 0.0)  # of the lost too


def test_only_waits_in_a_micro_step_are_no_computing():
    recorder = Recorder(None)
    recorder.add(WAIT, (1, 0, 4, 1), 1.0, 1.25)
    recorder.add(FETCH, (1, 0, 4, 1), 1.5, 2.0)
    recorder.add(WORK, (1, 0, 4, 1), 0.0, 8.0)
    recorder.add(WAIT, OUTSIDE, 8.0, 12.0)  # for what this rank still sends
    assert (recorder.drain(WAIT), recorder.drain_computing(), recorder.drain_computing()) == (4.25, 7.25, 0.0)


class Event:
    """A CUDA event on a stream whose time is `clock`, in milliseconds. Like a real one it only tells differences, and
    only of what the host knows to be over, which is what it waited for last, and all before it."""

    clock = 0.0
    over = 0.0

    def __init__(self):
        self._at = Event.clock

    def synchronize(self) -> None:
        Event.over = max(Event.over, self._at)

    def elapsed_time(self, stop: "Event") -> float:
        assert max(self._at, stop._at) <= Event.over
        return float(np.float32(stop._at - self._at))


def test_stream_times_become_the_hosts(monkeypatch):
    """After an hour float32 knows a quarter of a millisecond only: so times are made of short differences."""
    ticks = count(100.0, 50.0)
    monkeypatch.setattr("parallel_backend.rank.comm.recorder.time.perf_counter", lambda: next(ticks))
    first = Event.clock = 7_200_000.0
    recorder = Short(Event)  # the host's 100 s are two hours on the stream
    expected = []
    for number in range(4000):
        start = Event()
        Event.clock += 1000.125
        recorder.add(WAIT, OUTSIDE, start, Event())
        end = 100.0 + (Event.clock - first) / 1000
        expected.append((end - 1.000125, end))
        assert len(recorder._unread) == (number + 1 if number < 4 else 5 - number % 2)  # events are not kept for ever
        assert Event.over <= max(first, Event.clock - 4 * 1000.125)  # and the host waits for old ones only
    assert recorder.read()[0].tolist() == [pytest.approx(pair, abs=1e-6) for pair in expected[-Short.CAPACITY :]]
    recorder.restart()
    assert recorder.drain(WAIT) == pytest.approx(4000 * 1.000125, rel=1e-6)
    start = Event()
    Event.clock += 2.0
    recorder.add(WORK, OUTSIDE, start, Event())
    assert recorder.read()[0].tolist() == [pytest.approx((150.0, 150.002), abs=1e-9)]


@pytest.mark.parametrize("case", ["pipe", "displaced"])
def test_chrome_trace(case, remote, tmp_path):
    """Complete and metadata events of the Trace Event Format, as chrome://tracing and Perfetto read them."""
    trace = run(remote(MODES[case][0]), MODES[case][1])[0]
    write_chrome_trace(trace, tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = content["traceEvents"]
    assert content["otherData"]["hidden share of transfers"] == trace.hidden
    assert {event["ph"] for event in events} == {"X", "M"}
    names = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    timed = [event for event in events if event["ph"] == "X"]
    assert len(timed) == sum(len(rank.spans) for rank in trace.ranks)
    assert max(event["ts"] + event["dur"] for event in timed) == pytest.approx(trace.seconds * 1e6, abs=0.01)
    for pid, tid in {(event["pid"], event["tid"]) for event in timed}:
        assert {("process_name", pid, 0), ("thread_name", pid, tid)} <= names
        own, open_until = [event for event in timed if (event["pid"], event["tid"]) == (pid, tid)], []
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 2e-3  # nested, never half over
            open_until.append(event["ts"] + event["dur"])
    if case == "displaced":  # the keys of all layers are under way at once
        assert max(event["tid"] for event in timed) > 1
