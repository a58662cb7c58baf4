"""A plan cuts every weight once, and the ranks of the axis hold an N-th of the model each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnCut
from parallel_backend.own_class.cuts.tensor_plan import CutKind, cut_side
from parallel_backend.rank.loaded_stage import LoadedStage

pytestmark = pytest.mark.threads

BLOCKS = ("double_blocks", "single_blocks")


def stages(pools, file, degrees: Degrees) -> list[LoadedStage]:
    """What each rank has of the model."""
    model = pools.mini(file, degrees)
    return [engine.stage for worker in model.pool.ranks.workers.values() for engine in worker.engines.values()]


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=4), st.integers(1, 8))
def test_the_ranks_cut_a_side_into_all_of_it_once(parts, ranks):
    """Parts of so many units, of so many features."""
    cut = OwnCut("layer", CutKind.ROW.value, tuple(count * size for count, size in parts), tuple(n for n, _ in parts))
    spans = [cut_side(cut, sum(cut.sizes), index, ranks) for index in range(ranks)]
    assert sorted(i for rank in spans for span in rank for i in range(span.start, span.stop)) == list(range(sum(cut.sizes)))
    for own in spans:
        assert all(len(span) % size == 0 for span, (_, size) in zip(own, parts, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_value_of_the_file_is_on_exactly_one_rank_or_on_all(pools, mini_file, mini_model, ranks):
    whole, loaded = mini_model.state_dict(), stages(pools, mini_file, Degrees(tensor=ranks))
    parts = [dict(stage.model.named_parameters()) for stage in loaded]
    shapes = {name: tuple(value.shape) for name, value in whole.items()}
    cuts = [{name: stage.adapters._plan.shard(name, shape) for name, shape in shapes.items()} for stage in loaded]
    large = {name for name, shape in shapes.items() if len(shape) == 2 and name.startswith(BLOCKS)}
    assert all(cuts[0][name] is not None for name in large)
    for name, value in whole.items():
        cut = [shards[name] for shards in cuts]
        for own, shard in zip(parts, cut, strict=True):
            if shard is None:
                assert torch.equal(own[name], value), name
            elif not shard.spans:
                assert name not in own
            else:
                expected = torch.cat([value.narrow(shard.dim, s.start, len(s)) for s in shard.spans], shard.dim)
                assert torch.equal(own[name], expected), name
        if all(shard is not None for shard in cut):
            dim = cut[0].dim
            covered = sorted(i for shard in cut for s in shard.spans for i in range(s.start, s.stop))
            assert covered == list(range(value.shape[dim])), name


@pytest.mark.parametrize("degrees", [Degrees(tensor=4), Degrees(pipe=2, tensor=2)], ids=str)
def test_a_rank_holds_its_part_of_the_blocks(pools, mini_file, mini_model, degrees):
    """1/N of every block for tensor parallel, the blocks of one of N stages for a pipeline; what surrounds them is small."""
    parameters = dict(mini_model.named_parameters())
    around = sum(p.nbytes for name, p in parameters.items() if not name.startswith(BLOCKS))
    largest = max(pools.mini(mini_file, degrees).weight_bytes)
    blocks = {}
    for name, p in parameters.items():
        if name.startswith(BLOCKS):
            place = BLOCKS.index(name.split(".")[0]), int(name.split(".")[1])
            blocks[place] = blocks.get(place, 0) + p.nbytes
    sizes = [blocks[place] for place in sorted(blocks)]
    per_stage = len(sizes) // degrees.pipe
    heaviest = max(sum(sizes[i : i + per_stage]) for i in range(0, len(sizes), per_stage))
    assert largest <= 1.03 * heaviest / degrees.tensor + around
