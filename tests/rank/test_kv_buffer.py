"""Keys and values that are kept from call to call: each where it belongs, those of other ranks a call later, all moved on
along the line through the last two calls, and old ones corrected by new ones."""

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
    buffer = KVBuffer(TOKENS, 2, extrapolate=False, correct=False)
    call(buffer, 1.0, 1.0)
    buffer.filled = TOKENS
    keys, negated = call(buffer, 0.5, 2.0, [(Span(0, 2), Span(3, 5))])
    expected = values(1.0)
    expected[:, 3:5] = values(2.0, 2)
    assert torch.equal(keys, expected)
    assert torch.equal(negated, -expected)


def test_what_other_ranks_sent_is_there_from_the_next_call_on():
    buffer = KVBuffer(TOKENS, 2, extrapolate=False, correct=False)
    call(buffer, 1.0, 1.0)
    buffer.filled = TOKENS
    own = [(Span(0, 4), Span(0, 4))]
    call(buffer, 0.5, 2.0, own)
    theirs = torch.stack((values(7.0, 2), -values(7.0, 2)))
    buffer.layers[0].arriving.append(Arriving(Arrived(theirs), [[(Span(0, 2), Span(4, 6))]], ENTRIES))
    keys, negated = call(buffer, 0.25, 3.0, own)
    expected = torch.cat((values(3.0, 4), values(7.0, 2)), dim=1)
    assert torch.equal(keys, expected)
    assert torch.equal(negated, -expected)
    assert torch.equal(call(buffer, 0.1, 3.0, own)[0], expected)


@pytest.mark.parametrize(("time", "expected"), [(0.6, 2.5), (0.4, 3.0), (0.0, 4.0)])
def test_old_keys_are_moved_on_to_the_calls_time(time, expected):
    buffer = KVBuffer(TOKENS, 2, extrapolate=True, correct=False)
    call(buffer, 1.2, 1.0)
    buffer.filled = TOKENS
    call(buffer, 0.8, 2.0)
    keys, _ = call(buffer, time, 9.0, [(Span(0, 1), Span(0, 1))])
    assert torch.allclose(keys[:, 1:], values(expected)[:, 1:], atol=1e-5)
    assert torch.equal(keys[:, :1], values(9.0, 1))


def test_two_calls_at_one_time_are_one():
    """Heun's second call and the next step's first."""
    buffer = KVBuffer(TOKENS, 2, extrapolate=True, correct=False)
    call(buffer, 1.2, 1.0)
    buffer.filled = TOKENS
    call(buffer, 0.8, 5.0)
    call(buffer, 0.8, 2.0)
    keys, _ = call(buffer, 0.4, 9.0, [(Span(0, 1), Span(0, 1))])
    assert torch.allclose(keys[:, 1:], values(3.0)[:, 1:], atol=1e-5)


TEXT = 2


def joint(buffer: KVBuffer, time: float, keys, values, at: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """A model call of a layer with text tokens, which run along with the first band."""
    buffer.begin_call(time)
    image = (Span(0, len(at)), at.shift(TEXT))
    pieces = [(Span(0, TEXT), Span(0, TEXT)), (Span(TEXT, TEXT + len(at)), image[1])] if at.start == 0 else [image]
    return buffer.update(0, keys, values, pieces, ENTRIES, TEXT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("band", [Span(0, 2), Span(2, 4)])
def test_old_rows_are_corrected_by_new_ones(dtype, band):
    """Keys by a factor for each entry and head, values by a shift for each channel too. The text is no measure."""
    buffer = KVBuffer(TOKENS, 2, extrapolate=False)
    old = 300 + values(0.0, TEXT + TOKENS).to(dtype)  # squares are beyond float16
    joint(buffer, 1.0, old, old, Span(0, TOKENS))
    buffer.filled = TOKENS
    factor = torch.tensor([[0.5, 1.0, 2.0], [1.5, 0.25, 1.0]], dtype=dtype).view(2, 1, 3, 1)
    shift = torch.arange(24, dtype=dtype).view(2, 1, 3, 4)
    rows = slice(0, TEXT + 2) if band.start == 0 else band.shift(TEXT).slice
    new_keys, new_values = factor * old[:, rows], old[:, rows] + shift
    if band.start == 0:
        new_keys[:, :TEXT] = new_values[:, :TEXT] = 7.0
    keys, moved = joint(buffer, 0.5, new_keys, new_values, band)
    expected_keys, expected_values = factor * old, old + shift
    text = slice(0, TEXT)
    expected_keys[:, text] = expected_values[:, text] = 7.0
    if band.start:
        expected_keys[:, text] = expected_values[:, text] = old[:, text]
    assert torch.allclose(keys, expected_keys, rtol=1e-3)
    assert torch.allclose(moved, expected_values, rtol=1e-3)


def test_a_call_is_corrected_once_by_its_first_rows():
    buffer = KVBuffer(TOKENS, 2, extrapolate=False)
    call(buffer, 1.0, 1.0)
    buffer.filled = TOKENS
    first, _ = call(buffer, 0.5, 2.0, [(Span(0, 2), Span(4, 6))])
    first = first.clone()
    keys, negated = call(buffer, 0.5, 5.0, [(Span(0, 2), Span(0, 2))])
    assert torch.equal(keys[:, 2:], first[:, 2:])
    assert torch.equal(negated[:, :2], -values(5.0, 2))
    assert not torch.equal(first[:, :4], values(1.0)[:, :4])


@pytest.mark.parametrize(
    ("correct", "filled", "rows"), [(True, 2, Span(2, 4)), (True, 4, Span(3, 5)), (False, 6, Span(0, 2))]
)
def test_what_is_no_measure_corrects_nothing(correct, filled, rows):
    """Rows that were never written, those that only were in part, and reference tokens."""
    buffer = KVBuffer(TOKENS, 2, extrapolate=False, correct=correct)
    call(buffer, 1.0, 1.0, [(Span(0, filled), Span(0, filled))])
    buffer.filled = filled
    keys, _ = call(buffer, 0.5, 2.0, [(Span(0, 2), rows)])
    expected = torch.cat((values(1.0, filled)[:, : rows.start], values(2.0, 2), values(1.0, filled)[:, rows.stop :]), dim=1)
    assert torch.equal(keys, expected)


def test_rows_that_are_zero_stay_finite():
    buffer = KVBuffer(TOKENS, 2, extrapolate=False)
    zero = torch.zeros(2, TOKENS, 3, 4)
    joint(buffer, 1.0, torch.cat((zero, zero[:, :TEXT]), 1), torch.cat((zero, zero[:, :TEXT]), 1), Span(0, TOKENS))
    buffer.filled = TOKENS
    keys, _ = joint(buffer, 0.5, zero[:, :2] + 1, zero[:, :2] + 1, Span(2, 4))
    assert keys.isfinite().all()
    assert not keys[:, TEXT + 4 :].any()
