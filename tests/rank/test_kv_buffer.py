"""Keys and values that are kept from call to call: each where it belongs, those of other ranks a call later, and all moved
on along the line through the last two calls."""

import pytest
import torch

from parallel_backend.core.spans import Span
from parallel_backend.rank.attention.kv_buffer import Arriving, KVBuffer

TOKENS, ENTRIES = 6, Span(0, 2)
WHOLE = [(Span(0, TOKENS), Span(0, TOKENS))]


class Arrived:
    """A gathering whose parts are all there."""

    def __init__(self, *parts: torch.Tensor):
        self.parts = parts

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self.parts


def values(number: float, tokens: int = TOKENS) -> torch.Tensor:
    """[2, n, 3, 4], each value its own but for a common `number`."""
    return torch.arange(2.0 * tokens * 12).view(2, tokens, 3, 4) / 1000 + number


def call(buffer: KVBuffer, time: float, number: float, pieces=WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
    """A model call that computes these rows; what attention is given."""
    buffer.begin_call(time)
    tokens = sum(len(rows) for rows, _ in pieces)
    return buffer.update(0, values(number, tokens), -values(number, tokens), pieces, ENTRIES, 0)


def test_what_was_not_computed_is_as_it_was():
    buffer = KVBuffer(TOKENS, 2, extrapolate=False)
    call(buffer, 1.0, 1.0)
    buffer.filled = TOKENS
    keys, negated = call(buffer, 0.5, 2.0, [(Span(0, 2), Span(3, 5))])
    expected = values(1.0)
    expected[:, 3:5] = values(2.0, 2)
    assert torch.equal(keys, expected)
    assert torch.equal(negated, -expected)


def test_nothing_that_was_never_written_is_read():
    buffer = KVBuffer(TOKENS, 2, extrapolate=False)
    keys, _ = call(buffer, 1.0, 1.0, [(Span(0, 2), Span(0, 2))])
    assert torch.equal(keys, values(1.0, 2))


def test_what_other_ranks_sent_is_there_from_the_next_call_on():
    buffer = KVBuffer(TOKENS, 2, extrapolate=False)
    call(buffer, 1.0, 1.0)
    buffer.filled = TOKENS
    own = [(Span(0, 4), Span(0, 4))]
    call(buffer, 0.5, 2.0, own)
    theirs = torch.stack((values(7.0, 2), -values(7.0, 2)))
    buffer.add_pending(0, Arriving(Arrived(theirs), [[(Span(0, 2), Span(4, 6))]], ENTRIES))
    keys, negated = call(buffer, 0.25, 3.0, own)
    expected = torch.cat((values(3.0, 4), values(7.0, 2)), dim=1)
    assert torch.equal(keys, expected)
    assert torch.equal(negated, -expected)
    assert torch.equal(call(buffer, 0.1, 3.0, own)[0], expected)


@pytest.mark.parametrize(("time", "expected"), [(0.6, 2.5), (0.4, 3.0), (0.0, 4.0)])
def test_old_keys_are_moved_on_to_the_calls_time(time, expected):
    buffer = KVBuffer(TOKENS, 2, extrapolate=True)
    call(buffer, 1.2, 1.0)
    buffer.filled = TOKENS
    call(buffer, 0.8, 2.0)
    keys, _ = call(buffer, time, 9.0, [(Span(0, 1), Span(0, 1))])
    assert torch.allclose(keys[:, 1:], values(expected)[:, 1:], atol=1e-5)
    assert torch.equal(keys[:, :1], values(9.0, 1))


def test_two_calls_at_one_time_are_one():
    """Heun's second call and the next step's first."""
    buffer = KVBuffer(TOKENS, 2, extrapolate=True)
    call(buffer, 1.2, 1.0)
    buffer.filled = TOKENS
    call(buffer, 0.8, 5.0)
    call(buffer, 0.8, 2.0)
    keys, _ = call(buffer, 0.4, 9.0, [(Span(0, 1), Span(0, 1))])
    assert torch.allclose(keys[:, 1:], values(3.0)[:, 1:], atol=1e-5)


def test_without_extrapolation_keys_stay_and_there_is_one_set_of_them():
    buffers = [KVBuffer(TOKENS, 2, extrapolate=extrapolate) for extrapolate in (False, True)]
    for buffer in buffers:
        for time, number in ((1.2, 1.0), (0.8, 2.0)):
            call(buffer, time, number)
            buffer.filled = TOKENS
    assert torch.equal(call(buffers[0], 0.4, 9.0, [(Span(0, 1), Span(0, 1))])[0][:, 1:], values(2.0)[:, 1:])
    assert 2 * buffers[0].nbytes == buffers[1].nbytes == 2 * 2 * values(0.0).nbytes
