"""Random degrees, sizes, texts and bands: every token computed once, no rank waits for ever, the result is one process's."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas, sample_in_bands
from parallel_backend.core.communicators import lines_along
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.pipefusion_order import micro_steps
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.rank.attention.context import AttentionStep
from parallel_backend.rank.stage_ops import Op, stage_ops
from testing import mini

TOLERANCE = 1e-5


@st.composite
def degrees(draw, world: int):
    """Degrees with at most `world` ranks that combine."""
    sizes, room = [], world
    for axis in draw(st.permutations(AXES)):
        size = draw(st.integers(1, room))
        sizes.append((axis, size))
        room //= size
    given = dict(sizes)
    if given["pipe"] > 1:
        given["patch"] = 1
    return Degrees(**given, patch_mode="displaced")


def shares(draw, parts: int) -> tuple[float, ...]:
    weights = draw(st.lists(st.floats(0.2, 1), min_size=parts, max_size=parts))
    return tuple(weight / sum(weights) for weight in weights)


@given(degrees(64), st.integers(0, 20), st.integers(1, 200), st.integers(1, 5), st.booleans(), st.data())
def test_every_token_has_one_place_in_the_buffer(degrees, text, image, bands, text_first, data):
    """Over the micro-steps of a call, the sequence ranks' rows and positions in the K/V buffer are all tokens once."""
    cut = SequenceCut(shares(data.draw, degrees.patch), degrees.ring * degrees.ulysses, False)
    positions, everyone = [], range(degrees.sequence)
    for band, tokens in enumerate(split(Span(0, image), bands)):
        text_spans = cut.text(text if band == 0 else 0)
        step = AttentionStep(text, text_spans, cut.image(tokens), Span(0, 1), None, text_first=text_first)
        pieces = step.pieces(everyone)
        rows = [row for span, _ in pieces for row in range(span.start, span.stop)]
        assert rows == list(range(sum(step.lengths)))
        assert all(len(span) == len(place) for span, place in pieces)
        positions += [place for _, span in pieces for place in range(span.start, span.stop)]
        mine = [p for rank in everyone for p in step.pieces(range(rank, rank + 1))]
        assert [place for _, place in mine] == [place for _, place in pieces]
    assert sorted(positions) == list(range(text + image))


@given(degrees(64))
def test_ranks_and_places_are_one_to_one(degrees):
    seen = set()
    for batch in range(degrees.batch):
        for pipe in range(degrees.pipe):
            for place in range(degrees.sequence):
                for tensor, rank in enumerate(degrees.ranks(batch, pipe, place)):
                    at = degrees.coordinate(rank)
                    assert (at.batch, at.pipe, at.tensor) == (batch, pipe, tensor)
                    assert degrees.sequence_index(at) == place
                    seen.add(rank)
    assert seen == set(range(degrees.world))
    for axis in AXES:
        lines = lines_along(degrees, axis)
        assert sorted(rank for line in lines for rank in line) == list(range(degrees.world))
        assert all([getattr(degrees.coordinate(rank), axis) for rank in line] == list(range(len(line))) for line in lines)


def programs(degrees: Degrees, calls: list[bool], bands: int, layers: int) -> list[list[tuple]]:
    """What each rank does, in order: blocking transfers along the pipe, and collectives that wait for all of a line."""
    lines = {axis: {rank: line for line in lines_along(degrees, axis) for rank in line} for axis in AXES}
    result = []
    for rank in range(degrees.world):
        pipe, actions = lines["pipe"][rank], []
        stage = pipe.index(rank)
        for step in micro_steps(calls, bands):
            for op in stage_ops(stage, degrees.pipe):
                if op is Op.RECEIVE:
                    actions.append(("together", (pipe[stage - 1], rank), step))
                elif op is Op.SEND:
                    actions.append(("together", (rank, pipe[stage + 1]), step))
                else:
                    for layer in range(layers):
                        for axis in ("ulysses", "ring", "patch", "ulysses", "tensor"):
                            if getattr(degrees, axis) > 1:
                                actions.append(("together", lines[axis][rank], (step, layer, axis)))
        result.append(actions)
    return result


def finish(programs: list[list[tuple]]) -> None:
    """Run them side by side: an action happens when everyone it needs has come to it. Assertion if they get stuck."""
    at, moved = [0] * len(programs), True
    while moved:
        moved = False
        for me, program in enumerate(programs):
            if at[me] == len(program):
                continue
            action = program[at[me]]
            if all(at[other] < len(programs[other]) and programs[other][at[other]] == action for other in action[1]):
                for other in action[1]:
                    at[other] += 1
                moved = True
    assert all(place == len(program) for place, program in zip(at, programs, strict=True)), "deadlock"


@settings(deadline=None, max_examples=40)
@given(degrees(16), st.lists(st.booleans(), min_size=1, max_size=3), st.integers(1, 5))
def test_every_product_ends_even_if_every_transfer_blocks(degrees, exact, bands):
    finish(programs(degrees, exact, 1 if degrees.patch > 1 else bands, layers=2))


def test_the_simulation_sees_a_rank_that_disagrees():
    both = programs(Degrees(pipe=2, ring=2), [True, False], 2, 1)
    both[1] = both[1][::-1]
    with pytest.raises(AssertionError, match="deadlock"):
        finish(both)


# Loading is what takes time: few examples, and the worlds that other tests have started already.
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(degrees(4), st.integers(1, 3), st.integers(2, 12), st.integers(3, 12), st.integers(1, 9), st.integers(1, 5))
def test_random_problems_equal_one_process(remote, mini_model, degrees, batch, height, width, text, bands):
    x, timestep, tensors = mini.inputs(batch=batch, height=2 * height - 1, width=width, text=text)
    cut = SequenceCut((1 / degrees.patch,) * degrees.patch, degrees.ring * degrees.ulysses, False)
    tokens = height * math.ceil(width / 2)
    model = remote(degrees)
    if not all(len(shard) for shard in cut.image(Span(0, tokens))):
        with pytest.raises(ValueError, match="degree"):
            model.predict(ModelCall(x, timestep, tensors), lambda: None)
        return
    whole = mini.reference(mini_model, x, timestep, tensors)
    assert mini.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), whole) <= TOLERANCE
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(2)
    with torch.inference_mode():
        expected = euler(lambda *given: mini.reference(mini_model, *given), x, sigmas, prompt)
    sample, _ = sample_in_bands(model, x, sigmas, prompt, 1 if degrees.displaced else bands, warm_up=2)
    assert mini.relative(sample, expected) <= TOLERANCE
