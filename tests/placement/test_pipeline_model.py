"""The schedule ends even if every send blocks, covers everything exactly once, and takes as long as its formula says."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.core.pipefusion_order import MicroStep, entry_parts, micro_steps, window
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split, split_by_share
from parallel_backend.placement.balance import Balance, cut_blocks
from parallel_backend.placement.pipeline_model import StageCost, choose_bands, finish_times, simulate
from parallel_backend.rank.stage_ops import Op, stage_ops

Action = tuple[str, int, object]
"""("send" | "receive", the other process, what), or ("emit" | "await", -1, what): an event that never blocks its maker."""


class Deadlock(Exception):
    pass


def play(programs: Sequence[Sequence[Action]]) -> int:
    """Run the programs side by side; how many actions they took. A send and its receive happen together or not at all.

    Nothing is buffered anywhere, which is the hardest case: what ends here ends under any buffering. Deadlock if no
    program can go on, or if a receive meets a send of something else.
    """
    at, events, total = [0] * len(programs), set(), 0
    moved = True
    while moved:
        moved = False
        for me, program in enumerate(programs):
            while at[me] < len(program):
                kind, other, what = program[at[me]]
                if kind == "emit":
                    events.add(what)
                elif kind == "await":
                    if what not in events:
                        break
                elif kind == "send":
                    theirs = programs[other][at[other]] if at[other] < len(programs[other]) else None
                    if theirs is None or theirs[:2] != ("receive", me):
                        break
                    if theirs[2] != what:
                        raise Deadlock(f"{me} sends {what}, {other} wants {theirs[2]}")
                    at[other] += 1
                    total += 1
                else:
                    break  # the sender moves both
                at[me] += 1
                total += 1
                moved = True
    stuck = [f"{me} at {program[at[me]]}" for me, program in enumerate(programs) if at[me] < len(program)]
    if stuck:
        raise Deadlock("; ".join(stuck))
    return total


def pipeline(steps: list[MicroStep], stages: int, bands: int) -> list[list[Action]]:
    """What each stage does for these micro-steps, with what holds them up besides transfers.

    The first stage gets a micro-step when the sampler has the outputs that it follows from (the same band's of the call
    before, or everybody's), and when fewer than the client's window are under way.
    """
    under_way, programs = window(stages), [[] for _ in range(stages)]
    for number, step in enumerate(steps):
        needs = [
            before
            for before in steps
            if before.call == step.call - 1 and set(before.covers(bands)) & set(step.covers(bands))
        ]
        needs += [steps[number - under_way]] if number >= under_way else []
        programs[0] += [("await", -1, need) for need in needs]
        for stage, program in enumerate(programs):
            for op in stage_ops(stage, stages):
                if op is Op.RECEIVE:
                    program.append(("receive", stage - 1, step))
                elif op is Op.SEND:
                    program.append(("send", stage + 1, step))
        programs[-1].append(("emit", -1, step))
    return programs


def exact_first(steps: int, warm_up: int) -> list[bool]:
    return [step < warm_up for step in range(steps)]


@pytest.mark.parametrize("stages", range(1, 9))
def test_it_ends_with_every_send_blocking(stages):
    for bands, steps in itertools.product(range(1, 17), range(1, 9)):
        for warm_up in range(min(2, steps) + 1):
            program = micro_steps(exact_first(steps, warm_up), bands)
            assert len(program) == warm_up + (steps - warm_up) * bands
            assert play(pipeline(program, stages, bands)) == len(program) * (2 * (stages - 1) + 1) + sum(
                action[0] == "await" for action in pipeline(program, stages, bands)[0]
            )


def test_it_ends_with_an_exact_call_in_the_middle():
    program = micro_steps([True, False, True, False, False], 3)
    play(pipeline(program, 4, 3))


def test_the_player_sees_a_ring_of_blocking_sends():
    """xDiT's ring: the last stage sends the output back to the first, which is sending the next band at that time."""
    ring = [
        [("send", 1, "band 0"), ("send", 1, "band 1"), ("receive", 1, "out 0"), ("receive", 1, "out 1")],
        [("receive", 0, "band 0"), ("send", 0, "out 0"), ("receive", 0, "band 1"), ("send", 0, "out 1")],
    ]
    with pytest.raises(Deadlock, match=r"0 at .'send', 1, 'band 1'"):
        play(ring)


def test_the_player_sees_stages_that_disagree():
    """One stage runs its micro-steps in another order; and a stage that waits for an output which needs itself."""
    programs = pipeline(micro_steps([False, False], 2), 2, 2)
    swapped = [programs[0], [programs[1][2], *programs[1][1:2], programs[1][0], *programs[1][3:]]]
    with pytest.raises(Deadlock, match="wants"):
        play(swapped)
    cyclic = [[("await", -1, "last"), *programs[0]], [*programs[1], ("emit", -1, "last")]]
    with pytest.raises(Deadlock, match="await"):
        play(cyclic)


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


@pytest.mark.parametrize("stages", range(1, 9))
def test_what_one_stage_sends_the_next_one_receives(stages):
    for stage in range(stages):
        ops = stage_ops(stage, stages)
        assert ops.count(Op.COMPUTE) == 1
        assert (Op.SEND in ops) == (stage + 1 < stages and Op.RECEIVE in stage_ops(stage + 1, stages))
        assert [op for op in (Op.RECEIVE, Op.COMPUTE, Op.SEND) if op in ops] == list(ops)


@given(st.integers(0, 5), st.integers(0, 200), st.integers(1, 20))
def test_split_covers_every_token_once(start, length, parts):
    spans = split(Span(start, start + length), parts)
    assert len(spans) == parts
    assert [token for span in spans for token in range(span.start, span.stop)] == list(range(start, start + length))
    sizes = [len(span) for span in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 100), st.integers(1, 16), st.integers(1, 8))
def test_bands_cut_over_ranks_cover_every_token_once(tokens, bands, ranks):
    shards = [shard for band in split(Span(0, tokens), bands) for shard in split(band, ranks)]
    assert [token for shard in shards for token in range(shard.start, shard.stop)] == list(range(tokens))


@given(st.integers(0, 5), st.integers(0, 200), st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
def test_split_by_share_covers_every_token_once_and_keeps_the_shares(start, length, weights):
    shares = [weight / sum(weights) for weight in weights]
    spans = split_by_share(Span(start, start + length), shares)
    assert [token for span in spans for token in range(span.start, span.stop)] == list(range(start, start + length))
    assert all(abs(len(span) - share * length) <= 1 + 1e-6 for span, share in zip(spans, shares, strict=True))


@given(st.integers(0, 50), st.integers(1, 100), st.lists(st.floats(0.1, 1), min_size=1, max_size=4), st.integers(1, 4))
def test_a_sequence_cut_covers_every_token_once(text, image, weights, inner):
    shares = tuple(weight / sum(weights) for weight in weights)
    for repeat_text in (False, True):
        cut = SequenceCut(shares, inner, repeat_text)
        rows, text_spans = cut.image(Span(7, 7 + image)), cut.text(text)
        assert len(rows) == len(text_spans) == len(shares) * inner
        assert [token for span in rows for token in range(span.start, span.stop)] == list(range(7, 7 + image))
        seen = [token for span in text_spans for token in range(span.start, span.stop)]
        assert seen == list(range(text)) * (len(shares) if repeat_text else 1)


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


@pytest.mark.parametrize(("stages", "bands"), itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16)))
def test_finish_times_equal_the_formula(stages, bands):
    """T = W * t1 + ((S - W) * max(M, N) + min(M, N) - 1) * tau, for S > W, with tau = t1 / (N * M).

    For M >= N that is FIELD.md's formula. For M < N its last term, N - 1, overstates the time by N - M: there the bands
    cannot fill the pipeline, and the last call ends M - 1 bands after its first one, not N - 1.
    """
    whole = 1.0
    tau = whole / (stages * bands)
    for steps, warm_up in itertools.product((1, 2, 5), (0, 1, 2)):
        if warm_up > steps:
            continue
        banded = steps - warm_up
        fill = min(bands, stages) - 1 if banded else 0
        expected = warm_up * whole + (banded * max(bands, stages) + fill) * tau
        times = finish_times(exact_first(steps, warm_up), bands, [StageCost(0.0, whole / stages)] * stages)
        assert len(times) == steps
        assert times == sorted(times)
        assert times[-1] == pytest.approx(expected)
        if bands >= stages and banded:
            assert times[-1] == pytest.approx(warm_up * whole + (banded * max(bands, stages) + stages - 1) * tau)


def flat(*seconds: float):
    return lambda _step: seconds


def test_entries_and_transfers_by_hand():
    # Two entries of one exact call, stages of 1 s and 2 s: the second one is busy from 1 to 5.
    assert simulate(micro_steps([True], 2), 2, flat(1.0, 2.0), hop=0.25, entries=2) == [5.0]
    # The way to the next stage takes 0.5 s, beside the computing.
    assert simulate(micro_steps([True], 2), 2, flat(1.0, 2.0), flat(0.5, 0.0), 0.25, 2) == [5.5]
    # Two calls in two bands of 1 s: 0-1 1-2 | 1-2 2-3, then band 0 starts again at 2.25 and band 1 at 3.25.
    assert simulate(micro_steps([False] * 2, 2), 2, flat(1.0, 1.0), hop=0.25) == [3.0, 5.25]


def test_the_client_has_a_window_of_micro_steps_under_way():
    """Slow ways between stages: with one more micro-step under way than stages, four of them need two trips."""
    assert simulate(micro_steps([False], 4), 4, flat(1.0, 1.0), flat(100.0, 0.0)) == [102.0 + 102.0]


def test_the_slowest_stage_sets_the_pace():
    costs = [StageCost(0.0, seconds) for seconds in (1.0, 3.0, 2.0)]
    times = finish_times([False] * 50, 6, costs)
    assert times[-1] - times[-2] == pytest.approx(3.0)


def test_a_fixed_cost_is_paid_once_per_micro_step_and_a_hop_once_per_call():
    cost = StageCost(0.5, 4.0)
    assert finish_times([True, True], 4, [cost], hop=0.25) == pytest.approx([4.5, 9.25])
    assert finish_times([False], 4, [cost], hop=0.25) == pytest.approx([6.0])
    # With more bands than stages the hop hides behind the other bands; with as many it stands in the way.
    hidden, bare = (finish_times([False] * 20, bands, [StageCost(0.0, 1.0)] * 2, hop=0.1)[-1] for bands in (4, 2))
    assert hidden == pytest.approx(20 + 0.25)
    assert bare == pytest.approx(20 + 0.5 + 19 * 0.1)


def test_an_exact_call_drains_the_pipeline():
    assert finish_times([True] * 3, 4, [StageCost(0.0, 0.25)] * 4) == pytest.approx([1.0, 2.0, 3.0])
    refreshed = finish_times([False, True, False], 4, [StageCost(0.0, 0.25)] * 4)
    assert refreshed[1] - refreshed[0] == pytest.approx(1.0)


@given(st.integers(1, 16), st.integers(1, 256))
def test_choose_bands_without_measured_costs(stages, rows):
    bands = choose_bands(stages, rows, 20)
    assert 1 <= bands <= rows
    if stages == 1:
        assert bands == 1
    elif rows >= stages:
        assert stages <= bands <= max(stages, 8)
        assert bands == rows or bands >= min(2 * stages, 8)


@given(st.integers(2, 8), st.integers(1, 64), st.integers(1, 50), st.floats(0, 0.1), st.floats(1e-3, 1))
def test_choose_bands_by_measured_costs(stages, rows, steps, fixed, whole):
    bands = choose_bands(stages, rows, steps, [StageCost(fixed, whole)] * stages)
    assert min(stages, rows) <= bands <= rows


def test_costly_small_kernels_mean_few_bands_and_a_hop_means_more_than_stages():
    assert choose_bands(4, 64, 20, [StageCost(0.1, 0.1)] * 4) == 4
    assert choose_bands(4, 64, 20, [StageCost(0.0, 0.04)] * 4) > 4
    assert choose_bands(4, 64, 20, [StageCost(0.0, 10.0)] * 4) == 4  # the hop is nothing beside such a micro-step


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
