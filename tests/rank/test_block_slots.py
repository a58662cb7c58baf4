"""A control's residual is added to the tokens of its block's output, wherever they stand in it."""

import pytest
import torch
from torch import nn

from parallel_backend.families.base.blocks import BlockList
from parallel_backend.rank.stage.block_slots import BlockSlot, Residual, StageIO

TEXT, IMAGE = torch.randn(1, 2, 4), torch.randn(1, 3, 4)
RESIDUAL = torch.randn(1, 3, 4)


def slot(spec: BlockList, text_first: bool = True, text: torch.Tensor | None = None) -> BlockSlot:
    stage_io = StageIO(text_first, residuals={"blocks.1": Residual(RESIDUAL, text)})
    stage_io.text_tokens = TEXT.shape[1]
    return BlockSlot(spec, stage_io, nn.Identity, 1, 3)


@pytest.mark.parametrize("returns", [("text", "image"), ("image", "text")])
def test_of_a_block_that_returns_both(returns):
    streams = {"text": TEXT, "image": IMAGE}
    out = slot(BlockList("blocks", returns)).add_residual(tuple(streams[name] for name in returns))
    found = dict(zip(returns, out, strict=True))
    assert torch.equal(found["text"], TEXT)
    assert torch.equal(found["image"], IMAGE + RESIDUAL)


@pytest.mark.parametrize("text_first", [True, False])
def test_of_a_block_of_one_sequence(text_first):
    spec = BlockList("blocks", ("image",), joined=True)
    parts = (TEXT, IMAGE) if text_first else (IMAGE, TEXT)
    expected = (TEXT, IMAGE + RESIDUAL) if text_first else (IMAGE + RESIDUAL, TEXT)
    out = slot(spec, text_first).add_residual(torch.cat(parts, dim=1))
    assert torch.equal(out, torch.cat(expected, dim=1))


def test_of_the_text_too():
    spec = BlockList("blocks", ("image",), joined=True)
    out = slot(spec, text=TEXT).add_residual(torch.cat((TEXT, IMAGE), dim=1))
    assert torch.equal(out, torch.cat((2 * TEXT, IMAGE + RESIDUAL), dim=1))


def test_of_another_block_nothing_is_added():
    other = slot(BlockList("blocks"))
    other.name = "blocks.2"
    out = (TEXT, IMAGE)
    assert other.add_residual(out) is out
