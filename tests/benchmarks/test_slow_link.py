"""The queue that benchmarks have between ranks holds messages as a link would, and the ranks compute what they always do."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.slow_link import Messages, SlowGroup, Switch
from parallel_backend.rank.comm.interfaces import loopback_interface


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
        took = torch.empty_like(own)

        def swap() -> bool:
            works = [group.recv([took], other, 0), group.send([own], other, 0)]
            return all(work.wait() for work in works) and bool((took == other).all())

        def all_to_all() -> bool:
            """Of what each rank has half stays."""
            group.all_to_all_single(took, own, [], [], dist.AllToAllOptions()).wait()
            return took.reshape(2, -1).mean(1).tolist() == [0.0, 1.0]

        for transfer in (swap, all_to_all):
            started = time.monotonic()
            right = transfer()
            found[rank][transfer.__name__] = time.monotonic() - started, right

    threads = [threading.Thread(target=live, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    least = size / rate
    for name, part in {"swap": 1.0, "all_to_all": 0.5}.items():
        for rank in (0, 1):
            seconds, right = found[rank][name]
            assert right, name
            # The other rank may have come first, and then this one was only there for the rest.
            assert 0.5 * part * least < seconds, name
