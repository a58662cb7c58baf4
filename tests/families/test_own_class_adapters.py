"""Blocks of classes that take tokens in another form compute a part of their tokens as they compute all of them."""

import pytest
import torch
from torch import nn

from parallel_backend.families.own_class.adapters import Indexed, wan_block


class WithTimes(nn.Module):
    """As Wan's block: repeats values of frames [B, F, 6, D] over the tokens that it gets."""

    def forward(self, x, e, freqs):
        repeats = -(-x.shape[1] // e.shape[1]) if e.shape[1] > 1 else 1
        return x * e.repeat_interleave(repeats, dim=1)[:, : x.shape[1] if e.shape[1] > 1 else 1].sum(2) + freqs


@pytest.mark.parametrize("tokens", [6, 5, 1])
def test_frames_times_reach_each_token_of_a_part(tokens):
    g = torch.Generator().manual_seed(0)
    x, freqs = torch.randn(2, tokens, 4, generator=g), torch.randn(1, tokens, 4, generator=g)
    e, block = torch.randn(2, 3, 6, 4, generator=g), wan_block(WithTimes)()
    given = {}
    block.forward = lambda x, e, freqs: given.update(e=e) or type(block).forward(block, x, e=e, freqs=freqs)
    whole, plain = block(x, e=e, freqs=freqs), WithTimes()(x, e, freqs)
    assert torch.equal(whole, plain)
    data, index, count = given["e"]
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        found = block.forward(x[:, part], e=Indexed(data, index[part], count), freqs=freqs[:, part])
        assert torch.equal(found, plain[:, part])
