"""What the user sets, and what is worked out from it: degrees, stage_split, cuts, schedules, predictions."""

import itertools
import math
import random

from parallel_backend.core.communicators import lines_along
from parallel_backend.core.degrees import AXES, PATCH_MODES, Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.core.validate import check_model, check_ranks
from parallel_backend.placement.balance import check_stage_split, cut_blocks
from parallel_backend.placement.pipeline_model import StageCost, choose_bands, finish_times

from . import damage
from .runner import Case

SPLITS = (
    *("auto", "even", "AUTO ", "", ",", "1,", "3,5", "8", "4,4,0", "-1,9", "1e3,2", "1_0,2", "nan", "4.0,4"),
    *("\u0663,5", "9" * 5000),
)


def degrees(rng: random.Random) -> Case:
    size = rng.choice((3, 5, 70))
    given = {axis: rng.randint(1, size) if rng.random() < 0.5 else 1 for axis in AXES}
    if rng.random() < 0.2:
        given[rng.choice(AXES)] = rng.choice((0, -1, 2**70))
    mode, heads, blocks = rng.choice((*PATCH_MODES, "nonsense")), rng.randint(1, 40), rng.randint(1, 60)

    def case() -> str:
        try:
            found = Degrees(**given, patch_mode=mode)
            check_ranks(found)
            check_model(found, heads=heads, blocks=blocks, key_heads=rng.choice((None, heads)))
        except ValueError as error:
            assert any(word in str(error) for word in ("_degree ", "patch_mode")), error
            return "refused"
        assert found.world == math.prod(given.values())
        for axis in AXES:
            lines = lines_along(found, axis)
            assert sorted(rank for line in lines for rank in line) == list(range(found.world))
        return "taken"

    return case


def stage_splits(rng: random.Random) -> Case:
    text = rng.choice(SPLITS) if rng.random() < 0.4 else ",".join(str(rng.randint(-1, 9)) for _ in range(rng.randrange(6)))
    stages, blocks = rng.randint(1, 5), rng.randint(1, 30)

    def case() -> str:
        try:
            spans = check_stage_split(text, stages, blocks)
        except ValueError as error:
            assert str(error).startswith("stage_split "), error
            return "refused"
        if spans is None:
            return "left to the machine"
        assert [spans[0].start, spans[-1].stop] == [0, blocks] and len(spans) == stages
        assert all(len(span) > 0 for span in spans)
        return "taken"

    return case


def cuts(rng: random.Random) -> Case:
    """Blocks to stages, tokens to ranks, bands to rows."""
    stages = rng.randint(1, 6)
    count = rng.randint(stages, 40)
    sizes = [rng.randrange(0, 1000) for _ in range(count)]
    costs = [[rng.choice((0.0, 1e-9, 1.0, 1e9)) * rng.random() for _ in range(count)] for _ in range(stages)]
    room = [rng.choice((None, 0, 500, 10**9)) for _ in range(stages)]
    image, text, inner = rng.randrange(0, 3000), rng.randrange(0, 300), rng.randint(1, 8)
    weights = [rng.random() + 1e-9 for _ in range(rng.randint(1, 8))]

    def case() -> str:
        cut = SequenceCut(tuple(weight / sum(weights) for weight in weights), inner, False)
        for parts, total in ((cut.image(Span(0, image)), image), (cut.text(text), text)):
            assert sum(map(len, parts)) == total
            assert all(a.stop == b.start and a.start <= a.stop for a, b in itertools.pairwise(parts))
        assert sum(map(len, split(Span(0, image), inner))) == image
        found = cut_blocks(costs, sizes, room)
        if found is None:
            return "nothing fits"
        for span, most in zip(found, room, strict=True):
            assert len(span) and (most is None or sum(sizes[span.slice]) <= most)
        assert [found[0].start, found[-1].stop] == [0, count]
        return "cut"

    return case


def schedules(rng: random.Random) -> Case:
    stages, bands, calls = rng.randint(1, 8), rng.randint(1, 16), rng.randint(1, 40)
    costs = [StageCost(abs(float(damage.FLOATS[rng.randrange(3)])) * rng.random(), rng.random()) for _ in range(stages)]
    rows, steps = rng.randint(1, 200), rng.randint(0, 50)

    def case() -> str:
        exact = [rng.random() < 0.3 or index == 0 for index in range(calls)]
        times = finish_times(exact, bands, costs)
        assert len(times) == calls and all(a <= b + 1e-9 for a, b in itertools.pairwise(times))
        assert all(map(math.isfinite, times))
        chosen = choose_bands(stages, rows, steps, rng.choice((None, costs)))
        assert 1 <= chosen <= max(1, rows, stages)
        return "planned"

    return case


def make(rng: random.Random) -> Case:
    return rng.choice((degrees, stage_splits, cuts, schedules))(rng)
