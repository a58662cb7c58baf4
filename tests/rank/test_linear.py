"""A rank's linear layers, plain and packed, with an adapter, called as ComfyUI's own classes call them."""

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.checkpoints.quantised_formats import quantise_int8
from parallel_backend.core.fused_linear import FusedLinear
from parallel_backend.rank.stage.linear import PackedLinear, RankLinear

WIDTH, ROWS = 64, 32


def normed(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 0.25).rsqrt() * weight


def swiglu(x, _weight):
    gate, up = x[..., :WIDTH], x[..., WIDTH:]
    return gate * gate.sigmoid() * up


def situ(x, _weight):
    hidden, gate = x[..., :WIDTH], x[..., WIDTH:]
    return 100 * (hidden / 25).tanh() * (gate / 4).tanh() * gate.sigmoid()


def gelu(x, _weight):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {None: lambda x, _weight: x, "gelu_tanh": gelu, "swiglu": swiglu, "situ": situ, "rms_norm": normed}


@pytest.mark.parametrize("kind", ["before it is on a rank", "plain", "packed"])
@pytest.mark.parametrize("residual", ["none", "plain", "scaled"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_residual(kind, residual, activation):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    layer, adapter = FusedLinear(WIDTH, ROWS), (random(ROWS, 4), random(4, WIDTH))
    if kind != "before it is on a rank":
        RankLinear.adopt(torch.nn.ModuleList([layer]))
        layer.adapters.append(adapter)
    if kind == "packed":
        layer.pack(*quantise_int8(layer.weight.data), torch.float32)
        assert isinstance(layer, PackedLinear)
    x, weight = random(2, 3, 2 * WIDTH if activation in ("swiglu", "situ") else WIDTH), random(WIDTH)
    inner = ACTIVATIONS[activation](x, weight)
    expected = layer(inner)
    plain = F.linear(inner, layer.weight, layer.bias)
    if kind == "plain":
        assert torch.allclose(expected, plain + inner @ adapter[1].t() @ adapter[0].t(), atol=1e-4)
    given, scale = random(2, 3, ROWS), random(3, ROWS)
    more = {"input_act": activation, "act_weight": weight, "act_eps": 0.25}
    if residual != "none":
        more["residual"], expected = given, given + (scale if residual == "scaled" else 1) * expected
    if residual == "scaled":
        more["residual_scale"] = scale
    assert torch.allclose(layer(x, **more), expected, rtol=1e-4, atol=2e-4 if kind != "packed" else 0.05)


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ValueError, match="'new'"):
        FusedLinear(4, 4)(torch.zeros(1, 4), input_act="new")
