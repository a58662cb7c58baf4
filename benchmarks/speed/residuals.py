"""Seconds from a ControlNet's outputs in the client to copies of them on a rank: over the pipe, and in shared memory.

    python -m benchmarks.speed.residuals --megabytes 377 --rounds 5

A ControlNet for Flux with 15 outputs gives 377 MB for a picture of 1024 x 1024 in bf16. The rank is a process that
does with a micro-step what a CPU rank does before its first block. A segment is made in a round before those that count.
"""

import argparse
import itertools
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from parallel_backend.client.shared_residuals import SharedResiduals
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.shared_memory import Segment

OUTPUTS, HIDDEN = 15, 3072


def rank(connection: Connection) -> None:
    """Copies residuals, and says so, until there are none."""
    torch.set_num_threads(1)
    channel = Channel(connection, borrowed=lambda memory: lambda: None)
    while added := channel.receive().message.added:
        held = [tensor.to("cpu", copy=True) for tensor in added]
        channel.send(m.Ready(0))
        del held


class OnePool:
    """What SharedResiduals asks of ModelRanks, for one rank."""

    def __init__(self, channel: Channel):
        self.channel, self._numbers = channel, itertools.count(1)

    def next_segment(self) -> int:
        return next(self._numbers)

    def lends_to(self, rank: int) -> bool:
        return self.channel.lends

    def lend(self, rank: int, segment: Segment) -> None:
        self.channel.lend(segment)

    def drop(self, rank: int, segment: Segment) -> None:
        self.channel.drop(segment.number)

    def forget(self, rank: int, segment: Segment) -> None:
        self.channel.forget(segment.number)


def step(seq: int, added: list[torch.Tensor]) -> m.Step:
    span = Span(0, 1)
    return m.Step(seq, 0, 1, span, True, False, True, span, torch.ones(1), (), tuple(added), None)


def seconds(lends: bool, outputs: list[torch.Tensor], rounds: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=True)
    process = context.Process(target=rank, args=(theirs,), daemon=True)
    process.start()
    channel = Channel(ours, lends=lends)
    shared, found = SharedResiduals(Degrees(), OnePool(channel)), []
    for seq in range(rounds + 1):
        started = time.perf_counter()
        channel.send(step(seq, shared.place(0, seq, outputs)))
        channel.receive()
        shared.done(seq)
        found.append(time.perf_counter() - started)
    channel.send(step(0, []))
    process.join()
    shared.close()
    return found[1:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megabytes", type=float, default=377)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    tokens = round(given.megabytes * 1e6 / OUTPUTS / HIDDEN / 2)
    outputs = [torch.randn(1, tokens, HIDDEN).bfloat16() for _ in range(OUTPUTS)]
    nbytes = sum(tensor.nbytes for tensor in outputs)
    for name, lends in (("pipe", False), ("shared memory", True)):
        took = statistics.median(seconds(lends, outputs, given.rounds))
        print(f"{name}: {nbytes / 1e6:.0f} MB in {took:.3f} s, {nbytes / took / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
