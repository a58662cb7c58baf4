"""Which calls share a conditioning."""

from dataclasses import replace

import torch

from parallel_backend.client.call import Conditioning, ModelCall, TokenLayout
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.token_order import TokenOrder


def test_another_sound_and_whatever_else_ranks_were_told_is_another_conditioning():
    layout, tensors = TokenLayout((2, 3), companion_tokens=2), {"context": torch.zeros(1, 7, 8)}
    known = Conditioning(1, layout, TokenOrder(6, 3), 9, 1, tensors)
    call = ModelCall(torch.zeros(1), torch.zeros(1), {"context": torch.zeros(1, 7, 8)})
    assert known.matches(call, layout, ["context"])
    assert not known.matches(call, replace(layout, companion_tokens=4), [])
    assert not known.matches(call, replace(layout, grid=(3, 2)), [])
    assert not known.matches(replace(call, changes=BlockChanges(("blocks.1",))), layout, [])
    assert not known.matches(replace(call, tensors={}), layout, [])
    assert not known.matches(replace(call, tensors={"context": torch.ones(1, 7, 8)}), layout, ["context"])
