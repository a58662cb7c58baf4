"""The schedule ends even if every send blocks, covers everything exactly once, and takes as long as its formula says."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.core.pipefusion_order import entry_parts, micro_steps
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split, split_by_share
from parallel_backend.placement.balance import Balance, cut_blocks
from parallel_backend.placement.pipeline_model import StageCost, choose_bands, finish_times, simulate


@pytest.mark.parametrize("entries", range(4))
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_an_exact_call_fills_a_pipeline_with_its_entries(entries, stages):
    whole, band = (entry_parts(Span(3, 3 + entries), exact, stages) for exact in (True, False))
    assert [len(part) for part in whole] == ([1] * entries if stages > 1 else [entries] * bool(entries))
    assert band == ((Span(3, 3 + entries),) if entries else ())


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 16))
def test_every_call_covers_every_band_once_in_order(exact, bands):
    program = micro_steps(exact, bands)
    assert [step.call for step in program] == sorted(step.call for step in program)
    for call, whole in enumerate(exact):
        assert [step.band for step in program if step.call == call] == ([None] if whole else list(range(bands)))


@given(st.integers(0, 5), st.integers(0, 200), st.integers(1, 20))
def test_split_covers_every_token_once(start, length, parts):
    spans = split(Span(start, start + length), parts)
    assert len(spans) == parts
    assert [token for span in spans for token in range(span.start, span.stop)] == list(range(start, start + length))
    sizes = [len(span) for span in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 5), st.integers(0, 200), st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
def test_split_by_share_covers_every_token_once_and_keeps_the_shares(start, length, weights):
    shares = [weight / sum(weights) for weight in weights]
    spans = split_by_share(Span(start, start + length), shares)
    assert [token for span in spans for token in range(span.start, span.stop)] == list(range(start, start + length))
    assert all(abs(len(span) - share * length) <= 1 + 1e-6 for span, share in zip(spans, shares, strict=True))


@given(st.integers(1, 100), st.lists(st.floats(0.1, 1), min_size=1, max_size=4), st.integers(1, 4))
def test_a_sequence_cut_covers_every_token_once(image, weights, inner):
    shares = tuple(weight / sum(weights) for weight in weights)
    for repeat_text in (False, True):
        cut = SequenceCut(shares, inner, repeat_text)
        parts, got = cut.parts(Span(7, 7 + image)), cut.image(Span(7, 7 + image))
        assert len(parts) == len(got) == len(shares) * inner
        assert [token for span in parts for token in range(span.start, span.stop)] == list(range(7, 7 + image))
        assert repeat_text or set(got) == {Span(7, 7 + image)}
        bands = [token for span in got[::inner] for token in range(span.start, span.stop)]
        assert sorted(set(bands)) == list(range(7, 7 + image)) and (len(bands) == image or not repeat_text)


def cuts(count: int, parts: int):
    """All ways to cut `count` blocks into that many stages, each with at least one."""
    for inner in itertools.combinations(range(1, count), parts - 1):
        yield tuple(itertools.pairwise((0, *inner, count)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_cut_blocks_equals_brute_force(costs, data):
    parts = data.draw(st.integers(1, min(4, len(costs))))
    speeds = data.draw(st.lists(st.integers(1, 4), min_size=parts, max_size=parts))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(costs), max_size=len(costs)))
    room = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=parts, max_size=parts))
    spans = cut_blocks([[cost * speed for cost in costs] for speed in speeds], sizes, room)
    possible = [
        max(sum(costs[a:b]) * speed for (a, b), speed in zip(way, speeds, strict=True))
        for way in cuts(len(costs), parts)
        if all(r is None or sum(sizes[a:b]) <= r for (a, b), r in zip(way, room, strict=True))
    ]
    if not possible:
        assert spans is None
        return
    assert [block for span in spans for block in range(span.start, span.stop)] == list(range(len(costs)))
    assert len(spans) == parts
    assert all(len(span) for span in spans)
    assert all(r is None or sum(sizes[span.slice]) <= r for span, r in zip(spans, room, strict=True))
    found = max(sum(costs[span.slice]) * speed for span, speed in zip(spans, speeds, strict=True))
    assert found == min(possible)


def flat(*seconds: float):
    return lambda _step: seconds


def test_entries_and_transfers_by_hand():
    # Two entries of one exact call, stages of 1 s and 2 s: the second one is busy from 1 to 5.
    assert simulate(micro_steps([True], 2), 2, flat(1.0, 2.0), hop=0.25, entries=2) == [5.0]
    # The way to the next stage takes 0.5 s, beside the computing.
    assert simulate(micro_steps([True], 2), 2, flat(1.0, 2.0), flat(0.5, 0.0), 0.25, 2) == [5.5]
    # Two calls in two bands of 1 s: 0-1 1-2 | 1-2 2-3, then band 0 starts again at 2.25 and band 1 at 3.25.
    assert simulate(micro_steps([False] * 2, 2), 2, flat(1.0, 1.0), hop=0.25) == [3.0, 5.25]


def test_a_fixed_cost_is_paid_once_per_micro_step_and_a_hop_once_per_call():
    cost = StageCost(0.5, 4.0)
    assert finish_times([True, True], 4, [cost], hop=0.25) == pytest.approx([4.5, 9.25])
    assert finish_times([False], 4, [cost], hop=0.25) == pytest.approx([6.0])
    # With more bands than stages the hop hides behind the other bands; with as many it stands in the way.
    hidden, bare = (finish_times([False] * 20, bands, [StageCost(0.0, 1.0)] * 2, hop=0.1)[-1] for bands in (4, 2))
    assert hidden == pytest.approx(20 + 0.25)
    assert bare == pytest.approx(20 + 0.5 + 19 * 0.1)


@given(st.integers(1, 16), st.integers(1, 256))
def test_choose_bands_without_measured_costs(stages, rows):
    bands = choose_bands(stages, rows, 20)
    assert 1 <= bands <= rows
    if stages == 1:
        assert bands == 1
    elif rows >= stages:
        assert stages <= bands <= max(stages, 8)
        assert bands == rows or bands >= min(2 * stages, 8)


def test_the_number_of_bands_follows_the_size_of_the_run():
    """Small micro-steps need the slack of a second band for each stage; larger ones hide the hop without it."""
    small = Balance((), (), (StageCost(0.0002, 0.004),) * 4, timed_tokens=1024)
    assert small.costs(4096)[0] == StageCost(0.0002, 0.016)
    assert [choose_bands(4, 64, 20, small.costs(tokens)) for tokens in (1024, 8192)] == [8, 4]
    assert [choose_bands(4, 64, 20, small.costs(1024), entries) for entries in (1, 8)] == [8, 4]
    assert Balance((), (), None).costs(4096) is None


def test_an_exact_call_has_its_entries_one_by_one_and_a_band_all_at_once():
    costs = [StageCost(1.0, 4.0)] * 2
    assert finish_times([True], 2, costs, entries=3) == pytest.approx([4 * 5.0])  # two stages, three micro-steps of 5 s
    assert finish_times([False], 2, costs, entries=3) == pytest.approx([3 * 7.0])  # two bands of 1 + 3 * 2 s
