"""Micro-steps go out in the order of their calls, a window of them at a time, and what comes back is put in its place."""

import threading
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_backend.client.call import Conditioning, ModelCall, PostedCall, TokenLayout
from parallel_backend.client.conditioning_cache import CONDITIONINGS_KEPT, ConditioningCache
from parallel_backend.client.posting import Posting
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.wire.encoding import BadMessage
from parallel_backend.wire.sampling import DropConditioning, Output

TOKENS, WIDTH = 6, 4


class Queue(Posting):
    """Micro-steps that go to nobody. `sent`: (replica, number, entries of the call) of each."""

    def __init__(self, degrees: Degrees):
        shared: Any = SimpleNamespace(done=lambda _seq: None, close=lambda: None)
        nothing: Any = OrderedDict()
        cut = SequenceCut((1.0,), degrees.sequence, repeat_text=False)
        super().__init__(degrees, WIDTH, cut, nothing, shared, nothing, nothing, nothing, threading.RLock())
        self.sent = []

    def _send(self, replica, step):
        self.sent.append((replica, step.seq, step.entries))

    def _new_cut(self, call):
        shards = tuple((rows, Span(0, 0)) for rows in split(Span(0, TOKENS), self._degrees.sequence))
        return replace(super()._new_cut(call), shards=shards)

    def answer(self, seq: int, rank: int, entries: int, value: float):
        rows = split(Span(0, TOKENS), self._degrees.sequence)[rank % self._degrees.sequence]
        return self._accept(Output(rank, seq, torch.full((entries, len(rows), WIDTH), value)))


def call(batch: int, first_replica: int = 0, run: int = 0) -> PostedCall:
    order = TokenOrder(TOKENS, 3)
    conditioning = Conditioning(1, TokenLayout((2, 3)), order, 0, batch, {}, first_replica)
    x = torch.zeros(batch, TOKENS, WIDTH)
    return PostedCall(x, torch.zeros(batch), conditioning, Span(0, TOKENS), True, run, False, True, {})


def test_entries_of_an_exact_call_fill_a_pipeline_in_order_a_window_at_a_time():
    queue = Queue(Degrees(pipe=2))
    assert not queue.busy
    queue.post(call(5))
    assert queue.sent == [(0, 1 + index, Span(index, index + 1)) for index in range(3)]
    last = 1  # the rank of the last stage
    for index in range(5):
        assert queue.busy
        assembly, complete = queue.answer(1 + index, last, 1, float(index))
        assert complete == (index == 4)
        assert [seq for _, seq, _ in queue.sent] == list(range(1, min(6, 5 + index)))
    assert not queue.busy
    assert assembly.tokens()[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_of_a_call_that_cannot_be_sent_nothing_is_left():
    queue = Queue(Degrees(batch=2))
    send = queue._send

    def send_to_the_first(replica, step):
        if replica:
            raise RuntimeError("no storage")
        send(replica, step)

    queue._send = send_to_the_first
    with pytest.raises(RuntimeError):
        queue.post(call(4))
    queue._send = send
    queue.post(call(2))
    assert [(replica, seq) for replica, seq, _ in queue.sent] == [(0, 1), (0, 3), (1, 4)]
    for seq, rank in ((1, 0), (3, 0), (4, 1)):  # the first is what was under way
        _, complete = queue.answer(seq, rank, 2 if seq == 1 else 1, 1.0)
    assert complete


@pytest.mark.parametrize(("first_replica", "shares"), [(0, {0: 2, 1: 1}), (1, {0: 1, 1: 2})])
def test_the_first_replica_has_the_first_entries(first_replica, shares):
    queue = Queue(Degrees(batch=2))
    queue.post(call(3, first_replica))
    assert {replica: len(entries) for replica, _, entries in queue.sent} == shares
    assert next(entries for replica, _, entries in queue.sent if replica == first_replica) == Span(0, 2)


def test_parts_of_sequence_ranks_are_put_side_by_side():
    queue = Queue(Degrees(ulysses=2))
    queue.post(call(1))
    assert not queue.answer(1, 1, 1, 2.0)[1]
    assembly, complete = queue.answer(1, 0, 1, 1.0)
    assert complete
    assert assembly.tokens()[0, :, 0].tolist() == [1.0] * 3 + [2.0] * 3


def test_what_nobody_waits_for_is_refused():
    queue = Queue(Degrees(ulysses=2))
    with pytest.raises(BadMessage, match="which nobody waits for"):
        queue.answer(1, 0, 1, 0.0)
    queue.post(call(1))
    queue.answer(1, 0, 1, 0.0)
    with pytest.raises(BadMessage, match="which nobody waits for"):
        queue.answer(1, 0, 1, 0.0)
    with pytest.raises(BadMessage, match="for 1 entries and 3 tokens"):
        queue.answer(1, 1, 2, 0.0)


def test_a_run_that_is_forgotten_sends_no_more():
    queue = Queue(Degrees())
    calls = [call(1, run=number) for number in (1, 2, 1, 3)]
    for each in calls:
        queue.post(each)
    queue.abandon(lambda each: each.run == 1)
    for seq in (1, 2):
        queue.answer(seq, 0, 1, 0.0)
    assert [seq for _, seq, _ in queue.sent] == [1, 2, 4]
    queue.end(RuntimeError("unloaded"))
    assert [each.future.done() for each in calls] == [False, False, False, True]


def test_another_sound_and_whatever_else_ranks_were_told_is_another_conditioning():
    layout, tensors = TokenLayout((2, 3), companion_tokens=2), {"context": torch.zeros(1, 7, 8)}
    known = Conditioning(1, layout, TokenOrder(6, 3), 9, 1, tensors)
    call = ModelCall(torch.zeros(1), torch.zeros(1), {"context": torch.zeros(1, 7, 8)})
    assert known.matches(call, layout, ["context"])
    assert not known.matches(call, replace(layout, companion_tokens=4), [])
    assert not known.matches(call, replace(layout, grid=(3, 2)), [])
    assert not known.matches(replace(call, changes=BlockChanges(("blocks.1",))), layout, [])
    assert not known.matches(replace(call, tensors={}), layout, [])
    assert not known.matches(replace(call, tensors={"context": torch.ones(1, 7, 8)}), layout, ["context"])


def test_the_ranks_keep_conditionings_that_were_used_last():
    """A call that uses the oldest one again may still wait to be sent when another call brings in a new one."""
    told: list[Any] = []
    ranks: Any = SimpleNamespace(send=lambda _rank, message: told.append(message), tell=told.append)
    built = SimpleNamespace(
        text_tokens=lambda *_: 7,
        counted=lambda *_: SimpleNamespace(references=0),
        token_order=lambda *_: TokenOrder(6, 3),
    )
    checkpoint: Any = SimpleNamespace(built=built)
    cache = ConditioningCache(checkpoint, ranks, Degrees())

    def number(value: int) -> int:
        tensors = {"context": torch.full((1, 7, 8), float(value))}
        return cache.find(ModelCall(torch.zeros(1), torch.zeros(1), tensors), TokenLayout((2, 3))).id

    first, second, *_ = (number(value) for value in range(CONDITIONINGS_KEPT))
    assert number(0) == first
    number(CONDITIONINGS_KEPT)
    assert [message.id for message in told if isinstance(message, DropConditioning)] == [second]
    assert number(0) == first
