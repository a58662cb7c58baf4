"""Long skips (HunyuanDiT's) cross every boundary between stages, and nothing but what is wanted behind it does."""

from itertools import combinations, pairwise

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import Rows, StepInputs
from parallel_backend.rank.stage.block_slots import StageDone
from parallel_backend.rank.stage.build import build_stage
from tests.families.cases.hunyuan_dit import CASES
from tests.support import tiny

pytestmark = pytest.mark.threads

CASE = CASES[1]
LAYERS = CASE.config["num_layers"]
CUTS = [edges for count in (1, 2) for edges in combinations(range(1, LAYERS), count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(what diffusers gives, the checkpoint, inputs of a call)"""
    model = CASE.model()
    path = CASE.save(model, tmp_path_factory.mktemp("skips") / "model.safetensors")
    given = CASE.inputs()
    with torch.inference_mode():
        return CASE.reference(model, *given), open_checkpoint(path), given


def run(made, edges, spoil=lambda sent: sent):
    """(the last stage's output, how many tensors each boundary saw); `spoil` changes what is sent on the way."""
    _, checkpoint, (x, timestep, tensors) = made
    family, sent, crossed = checkpoint.family, None, []
    grid = family.patching.grid(tuple(x.shape))
    token_order = family.token_order(grid)
    rows = Rows(slice(None), token_order.tokens, Span(0, 0), True)
    for start, stop in pairwise((0, *edges, LAYERS)):
        stage = build_stage(checkpoint, Span(start, stop), torch.device("cpu"), "fp32")
        stage.stage_io.begin_step(sent, 0, rows)
        tokens = family.patching.pack(x) if start == 0 else None
        inputs = StepInputs(tokens, timestep, tensors, grid, token_order, token_order.span, Span(0, 0))
        try:
            with torch.inference_mode():
                return family.patching.unpack(family.run(stage.model, inputs), tuple(x.shape)), crossed
        except StageDone as done:
            sent = spoil(stage.stage_io.outgoing(done))
            crossed.append(len(sent) // len(x))
    raise AssertionError("the last stage ended early")


@pytest.mark.parametrize("edges", CUTS, ids=str)
def test_stages_cut_anywhere_equal_diffusers(made, edges):
    output, crossed = run(made, edges)
    assert tiny.relative(output, made[0]) <= 1e-6
    assert crossed == [1 + [0, 0, 1, 2, 3, 3, 2, 1][edge] for edge in edges]  # of 8 blocks, 0, 1, 2 feed 7, 6, 5


@pytest.mark.parametrize("degrees", [Degrees(pipe=2, ulysses=2), Degrees(pipe=2, tensor=2), Degrees(pipe=4)], ids=str)
def test_ranks_that_share_stages_equal_diffusers(made, pools, degrees):
    """Each passes on its own tokens' skips."""
    expected, checkpoint, given = made
    output = pools.load(checkpoint.path, degrees).predict(*given, lambda: None)
    assert tiny.relative(output, expected) <= 1e-6


def test_the_comparison_sees_what_skips_bring(made):
    batch = len(made[2][0])

    def spoil(sent):
        return torch.cat((sent[:batch], torch.zeros_like(sent[batch:])))

    assert tiny.relative(run(made, (4,), spoil)[0], made[0]) > 1e-3


@pytest.mark.parametrize("layers", [4, 6, 10, 40])
def test_what_crosses_is_what_the_classes_loop_still_wants(layers):
    family, config = FAMILIES["hunyuan-dit"], CASE.config | {"num_layers": layers}
    pending = []
    for layer in range(layers):  # as in HunyuanDiT2DModel.forward
        if layer > layers // 2:
            pending.pop()
        if layer < layers // 2 - 1:
            pending.append(layer)
        expected = tuple(f"blocks.{index}" for index in pending if index != layer)
        assert family.blocks.carried(config, layer + 1) == expected
    assert not pending


def test_families_without_skips_send_hidden_states_alone():
    family, config = FAMILIES["flux"], tiny.FLUX
    assert all(family.blocks.carried(config, boundary) == () for boundary in range(family.blocks.total(config) + 1))
