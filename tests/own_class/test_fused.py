"""Fused arithmetic: rotations by torch's operations, and when comfy-kitchen's kernels compute."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.core import kitchen
from parallel_backend.own_class.cuts import fused

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_pairs_of_channels_are_turned_in_float32(halves, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, angles = torch.randn(2, 7, 3, 16), torch.rand(7, 8)[None, :, None] * 6
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))

    def turned(given):
        first, second = given.float().chunk(2, dim=-1) if halves else (given.float()[..., 0::2], given.float()[..., 1::2])
        both = first * cos - second * sin, first * sin + second * cos
        return (torch.cat(both, dim=-1) if halves else torch.stack(both, dim=-1).flatten(-2)).type_as(given)

    assert torch.allclose(fused.both_rotated(x, x, turns, halves)[1], turned(x), atol=1e-6)
    half = x.bfloat16()
    assert torch.equal(fused.both_rotated(half, half[:1], turns, halves)[0], turned(half))


def test_more_elements_than_a_kernel_counts_are_torchs(monkeypatch):
    monkeypatch.setattr(fused, "_kernel", lambda name, x: pytest.fail(name))
    norm, vector = torch.nn.LayerNorm(2048, elementwise_affine=False), torch.empty(1, 1, 2048, device="meta")
    assert fused.modulated(norm, torch.empty(1, 1 << 20, 2048, device="meta"), vector, vector).is_meta


def test_there_is_no_kernel_on_a_cpu_nor_in_float32(monkeypatch):
    half = torch.randn(1, 4, 2, 64).bfloat16()
    assert fused._kernel("apply_rope1", half) is None
    monkeypatch.setattr(kitchen, "fused_kernel", lambda name: name)
    on_card = SimpleNamespace(
        is_cuda=True, element_size=lambda: 2, numel=lambda: 8, dtype=half.dtype, device=half.device, requires_grad=False
    )
    assert fused._kernel("apply_rope1", on_card) == "apply_rope1"
    assert fused._kernel("apply_rope1", SimpleNamespace(**vars(on_card) | {"element_size": lambda: 4})) is None
    assert fused._kernel("apply_rope1", SimpleNamespace(**vars(on_card) | {"requires_grad": True})) is None


def test_a_kernel_is_used_where_the_package_has_it(monkeypatch):
    find = kitchen.fused_kernel.__wrapped__
    assert find("adaln") is None  # there are no CUDA kernels here
    monkeypatch.setattr(kitchen, "_has_cuda_kernels", lambda: True)
    assert isinstance(find("adaln"), kitchen.DirectCall)
    assert find("of_a_later_release") is None


def test_an_implementation_is_chosen_for_each_form_of_arguments(monkeypatch):
    x, vectors = torch.randn(1, 3, 8), torch.randn(2, 1, 1, 8)
    asked, kernel = [], kitchen.DirectCall("adaln")
    choose = kernel._registry.get_implementation

    def noted(name, kwargs):
        asked.append(tuple(kwargs["x"].shape))
        return choose(name, kwargs=kwargs)

    monkeypatch.setattr(kernel._registry, "get_implementation", noted)
    for each in (x, x + 1, x[:, :2], x):
        assert torch.equal(kernel(each, *vectors, 1e-6), torch.ops.comfy_kitchen.adaln(each, *vectors, 1e-6))
    ours = [shape for place, shape in enumerate(asked) if place in (0, 3)]
    assert ours == [(1, 3, 8), (1, 2, 8)]
