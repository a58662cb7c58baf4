"""Wan's rotary embedding. That the classes which have it compute what diffusers' do, test_families.py shows."""

import pytest
import torch

from parallel_backend.families.models.wan_rotary import rotated
from testing.tiny import relative


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-7), (torch.bfloat16, 3e-3)])
def test_it_turns_pairs_in_float32(dtype, limit):
    g = torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 5, 3, 8, generator=g).to(dtype), torch.randn(1, 5, 1, 4, generator=g)
    turned = rotated(x, *(each.repeat_interleave(2, dim=-1) for each in (angle.cos(), angle.sin())))
    assert turned.dtype == dtype and turned.shape == x.shape
    pairs, angle = x.double().unflatten(-1, (-1, 2)), angle.double()
    first, second = pairs.unbind(-1)
    expected = torch.stack((first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), -1)
    assert relative(turned.double(), expected.flatten(-2)) < limit
