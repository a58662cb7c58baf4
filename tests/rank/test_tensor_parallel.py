"""A plan cuts every weight once, and the ranks of the axis hold an N-th of the model each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.checkpoints.checkpoint import open_checkpoint, to_original
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span, split
from parallel_backend.core.validate import check_model
from parallel_backend.families import FAMILIES
from parallel_backend.families.base import tensor_plan
from parallel_backend.families.base.tensor_plan import (
    HEADS,
    WIDTH,
    CutKind,
    LayerCut,
    cut_side,
)
from parallel_backend.placement.memory_model import memory_of
from parallel_backend.placement.model_sizes import model_sizes
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.stage.build import build_stage
from parallel_backend.rank.stage.tensor_parallel import TensorPlan
from testing import tiny
from testing.real_sizes import save_header

pytestmark = pytest.mark.threads

PLAN = FAMILIES["flux"].tensor_plan
BLOCKS = tuple(PLAN)


def plan(index: int, ranks: int) -> TensorPlan:
    config = tiny.FLUX
    axis = Axis("tensor", ranks, index, tuple(range(ranks)), None)
    return TensorPlan(PLAN, config["num_attention_heads"], config["attention_head_dim"], axis)


@given(st.integers(1, 24), st.integers(1, 16), st.integers(1, 300), st.integers(1, 3), st.data())
def test_the_ranks_cut_a_side_into_all_of_it_once(heads, head_size, width, widths, data):
    ranks = data.draw(st.integers(1, heads))
    parts = data.draw(st.permutations([HEADS] * data.draw(st.integers(0, 3)) + [WIDTH] * widths))
    size = heads * head_size * parts.count(HEADS) + width * widths
    spans = [cut_side(LayerCut(CutKind.ROW, tuple(parts)), size, heads, head_size, index, ranks) for index in range(ranks)]
    assert sorted(i for rank in spans for span in rank for i in range(span.start, span.stop)) == list(range(size))
    for own in spans:
        assert len(own) == len(parts)
        assert all(len(span) % head_size == 0 for span, part in zip(own, parts, strict=True) if part == HEADS)


def test_more_ranks_than_groups_of_heads_are_refused():
    sizes = {"heads": 9, "blocks": 4, "key_heads": 3}
    check_model(Degrees(tensor=3), **sizes)
    check_model(Degrees(tensor=2, ulysses=3), **sizes)
    with pytest.raises(ValueError, match="tensor_parallel_degree is 4, but this model has 3 groups of attention heads"):
        check_model(Degrees(tensor=4), **sizes)
    with pytest.raises(ValueError, match="ulysses_degree is 4, but this model has 9 attention heads, 3 for each"):
        check_model(Degrees(tensor=2, ulysses=4), **sizes)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_value_of_the_file_is_on_exactly_one_rank_or_on_all(flux_file, flux_model, ranks):
    checkpoint, whole = open_checkpoint(flux_file), flux_model.state_dict()
    parts = [
        dict(build_stage(checkpoint, Span(0, 8), torch.device("cpu"), "fp32", plan(index, ranks)).model.named_parameters())
        for index in range(ranks)
    ]
    plans = [plan(index, ranks) for index in range(ranks)]
    shapes = {name: tuple(value.shape) for name, value in whole.items()}
    for name, value in whole.items():
        cut = [p.shards(shapes).get(name) for p in plans]
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


def test_large_layers_outside_of_the_blocks_are_cut_and_the_memory_model_knows(flux_file, flux_model, monkeypatch):
    monkeypatch.setattr(tensor_plan, "LARGE", 1000)
    checkpoint, ranks = open_checkpoint(flux_file), 4
    stages = [build_stage(checkpoint, Span(0, 8), torch.device("cpu"), "fp32", plan(index, ranks)) for index in range(ranks)]
    outside = stages[0].plan.outside
    assert {"norm_out.linear", "context_embedder", "time_text_embed.timestep_embedder.linear_2"} <= outside
    for name, layer in flux_model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.startswith(BLOCKS):
            assert (name in outside) == (layer.weight.numel() >= 1000), name
    held = [sum(p.nbytes for p in stage.model.parameters()) for stage in stages]
    degrees = Degrees(tensor=ranks)
    sizes = model_sizes(checkpoint, "fp32", "cpu")
    foretold = [memory_of(sizes, degrees, (Span(0, 8),), rank, ()).weights for rank in range(ranks)]
    assert held == pytest.approx(foretold, rel=0.03)


@pytest.mark.parametrize(
    "degrees", [Degrees(tensor=2), Degrees(tensor=4), Degrees(pipe=2), Degrees(pipe=2, tensor=2)], ids=str
)
def test_ranks_hold_little_more_than_a_real_file(tmp_path, degrees):
    path = save_header(tmp_path / "flux1-dev.safetensors")
    sizes = model_sizes(open_checkpoint(path), "bf16", "cuda")
    blocks = len(sizes.block_bytes)
    spans = tuple(split(Span(0, blocks), degrees.pipe))
    held = sum(memory_of(sizes, degrees, spans, rank, ()).weights for rank in range(degrees.world))
    assert path.stat().st_size <= held <= 1.02 * path.stat().st_size


def test_every_large_weight_of_a_block_is_cut(flux_model):
    shapes = {name: tuple(value.shape) for name, value in flux_model.state_dict().items()}
    large = {name for name, shape in shapes.items() if len(shape) == 2 and name.startswith(BLOCKS)}
    assert large <= plan(0, 2).shards(shapes).keys()


@pytest.mark.parametrize(
    "degrees", [Degrees(tensor=2), Degrees(tensor=4), Degrees(pipe=2, tensor=2), Degrees(pipe=2), Degrees(tensor=8)], ids=str
)
def test_a_rank_holds_its_part_of_the_blocks(pools, flux_file, flux_model, degrees):
    """1/N of every block for tensor parallel, the blocks of one of N stages for a pipeline; what surrounds them is small."""
    parameters = dict(flux_model.named_parameters())
    around = sum(p.nbytes for name, p in parameters.items() if not name.startswith(BLOCKS))
    largest = max(pools.load(flux_file, degrees).weight_bytes)
    blocks = {}
    for name, p in parameters.items():
        if name.startswith(BLOCKS):
            place = BLOCKS.index(name.split(".")[0]), int(name.split(".")[1])
            blocks[place] = blocks.get(place, 0) + p.nbytes
    sizes = [blocks[place] for place in sorted(blocks)]
    per_stage = len(sizes) // degrees.pipe
    heaviest = max(sum(sizes[i : i + per_stage]) for i in range(0, len(sizes), per_stage))
    assert largest <= 1.03 * heaviest / degrees.tensor + around


def test_original_layout_and_folder_give_the_same_shards(flux_file, flux_model, tmp_path):
    """In the original layout a shard is rows of a packed tensor: of q, of k and of v apart."""
    import json

    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in flux_model.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel", **tiny.FLUX}))
    for index in range(2):
        one, two = (
            build_stage(open_checkpoint(path), Span(0, 8), torch.device("cpu"), "fp32", plan(index, 2)).model
            for path in (flux_file, tmp_path)
        )
        for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
            assert torch.equal(a, b), name


def test_the_output_norm_is_read_whole_in_its_swapped_order(flux_file, flux_model):
    """The one packed tensor that the plan leaves whole and whose halves change places."""
    state = to_original(FAMILIES["flux"], tiny.FLUX, flux_model.state_dict())
    half = state["final_layer.adaLN_modulation.1.weight"].chunk(2)
    model = build_stage(open_checkpoint(flux_file), Span(0, 8), torch.device("cpu"), "fp32", plan(1, 2)).model
    assert torch.equal(model.norm_out.linear.weight, torch.cat(half[::-1]))
