"""The queue that benchmarks have between ranks holds messages as a link would, and the ranks compute what they always do."""

import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from benchmarks.harness import measuring
from benchmarks.harness.slow_link import Messages, SlowGroup, Switch
from benchmarks.harness.subjects import FLUX_LIKE
from benchmarks.predictions.presets import HARDWARE, MODELS
from benchmarks.speed import links
from benchmarks.speed.links import LINKS, scale
from parallel_backend.rank.comm.interfaces import loopback_interface

SMALL = {"width": 32, "axes": (4, 6, 6), "double_blocks": 1, "single_blocks": 1}
FLUX = replace(FLUX_LIKE, config=FLUX_LIKE.config | SMALL, side=16, text=4, steps=2)


class Wires:
    """Three ranks' ends of one group's messages, with a clock that is set."""

    def __init__(self, folder: Path):
        self.switch, self.now = Switch(folder, 3), 0.0
        self.switch.set(100.0, 0.5)
        self.ends = [Messages(self.switch, "group", (0, 1, 2), lambda: self.now) for _ in range(3)]

    def message(self, source: int, target: int, size: int, sent: float, received: float) -> float:
        """When it has left, if its ends are called for at these times."""
        calls = [(sent, source, True), (received, target, False)]
        for self.now, rank, sends in sorted(calls):
            slot = self.ends[rank].call(source, target, size, sends)
        return self.ends[source].left(slot)


@pytest.fixture
def wires(tmp_path) -> Wires:
    return Wires(tmp_path)


def test_a_message_begins_with_its_later_end(wires):
    assert wires.message(0, 1, 200, sent=1.0, received=4.0) == 6.0
    assert wires.message(0, 1, 200, sent=9.0, received=7.0) == 11.0


def test_a_port_has_one_message_at_a_time_each_way(wires):
    assert wires.message(0, 1, 100, 0.0, 0.0) == 1.0
    assert wires.message(0, 1, 100, 0.0, 0.0) == 2.0, "behind the one before"
    assert wires.message(1, 0, 100, 0.0, 0.0) == 1.0, "the other direction is free"
    assert wires.message(0, 2, 100, 0.0, 0.0) == 3.0, "the sender's way out is not"
    assert wires.message(1, 2, 100, 0.0, 0.0) == 4.0, "nor is the receiver's way in"
    assert wires.message(2, 1, 100, 5.0, 5.0) == 6.0


def test_links_keep_their_share_of_a_step():
    """A block's tensor takes the same part of a block, here and on the GPU; so does the latency."""
    model, real = MODELS["flux-dev"], LINKS["PCIe 3 x8"]
    tokens = 4096 + model.text
    there = model.block(HARDWARE[real.gpu]).work(tokens, tokens)
    bandwidth, latency = scale(FLUX_LIKE, 0.6, real.gpu).link(real)
    size = (FLUX_LIKE.tokens + FLUX_LIKE.text) * FLUX_LIKE.width * 4
    assert size / bandwidth / 0.1 == pytest.approx(tokens * model.hidden * 2 / real.bandwidth / there)
    assert latency / 0.1 == pytest.approx(real.latency / there)


def test_a_groups_transfers_arrive_whole_and_no_sooner_than_their_bytes_allow(tmp_path, monkeypatch):
    """Two ranks in threads. Both directions work at once: as long as one message's bytes, not two."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback_interface())
    store, size, rate = dist.HashStore(), 1 << 16, 1e6
    found: dict[int, dict[str, tuple[float, bool]]] = {0: {}, 1: {}}

    def live(rank: int) -> None:
        switch, other = Switch(tmp_path, 2), 1 - rank
        switch.set(rate, 0.0)
        gloo = dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=60))
        group = SlowGroup(gloo, switch, Messages(switch, "group", (0, 1)))
        own = torch.full((size // 4,), float(rank))
        took, both = torch.empty_like(own), own.new_empty(2 * len(own))

        def swap() -> bool:
            works = [group.recv([took], other, 0), group.send([own], other, 0)]
            return all(work.wait() for work in works) and bool((took == other).all())

        def all_to_all() -> bool:
            """Of what each rank has half stays."""
            group.all_to_all_single(took, own, [], [], dist.AllToAllOptions()).wait()
            return took.reshape(2, -1).mean(1).tolist() == [0.0, 1.0]

        def gather() -> bool:
            group.all_gather_single(both, own, c10d.AllgatherOptions()).wait()
            return both.reshape(2, -1).mean(1).tolist() == [0.0, 1.0]

        def reduce() -> bool:
            group.allreduce([took.fill_(rank + 1)], dist.AllreduceOptions()).wait()
            return bool((took == 3).all())

        for transfer in (swap, all_to_all, gather, reduce):
            started = time.monotonic()
            right = transfer()
            found[rank][transfer.__name__] = time.monotonic() - started, right

    threads = [threading.Thread(target=live, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    least = size / rate
    for name, part in {"swap": 1.0, "all_to_all": 0.5, "gather": 1.0, "reduce": 1.0}.items():
        for rank in (0, 1):
            seconds, right = found[rank][name]
            assert right, name
            # The other rank may have come first, and then this one was only there for the rest.
            assert 0.5 * part * least < seconds, name


@pytest.mark.processes
@pytest.mark.full
def test_ranks_at_slow_links_compute_what_they_always_do():
    said = []
    cases = ["ulysses", "ring", "displaced", "pipefusion M=2"]
    result = links.run(FLUX, 1, said.append, ["10 Gbit Ethernet"], cases, plan=False, peers=False)
    found = result["links"]["10 Gbit Ethernet"]
    assert [name for name in cases if found["cases"][name]["exact"]] == ["ulysses", "ring"]
    assert found["MB_per_second"] > 0 and measuring.readable(result)
    for name in ("ulysses", "ring"):
        case = found["cases"][name]
        (sent,) = case["sent_MB_per_step"].values()
        assert case["seconds_per_step"]["median"] > sent / 2 / found["MB_per_second"], "of two ranks, both ways at once"
