"""Products that a trial computes once."""

import pytest
import torch
from torch import nn

from parallel_backend.own_class.trials.known_products import KEPT, KnownProducts


def writes_into_the_output(_layer, _x, out):
    out.zero_()


def writes_into_the_input(_layer, x, _out):
    x.add_(1)


def writes_into_the_weight(layer, _x, _out):
    layer.weight.mul_(2)


def has_another_weight(layer, _x, _out):
    layer.weight = nn.Parameter(2 * layer.weight)


def has_another_bias(layer, _x, _out):
    layer.bias = nn.Parameter(layer.bias + 1)


CHANGES = writes_into_the_output, writes_into_the_input, writes_into_the_weight, has_another_weight, has_another_bias


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_gives_its_product_whatever_was_before(change):
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with torch.no_grad(), KnownProducts():
        change(layer, x, layer(x))
        assert torch.equal(layer(x), x @ layer.weight.T + layer.bias)


def test_the_product_of_the_same_values_is_not_computed_again():
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with torch.no_grad(), KnownProducts():
        first = layer(x)
        layer.weight.data.zero_()  # which a tensor's version does not tell
        assert torch.equal(layer(x.clone()), first)


@pytest.mark.parametrize(("most", "inputs"), [(1 << 30, KEPT + 1), (100, 2)])
def test_products_of_too_many_inputs_are_computed_again(monkeypatch, most, inputs):
    monkeypatch.setattr("parallel_backend.own_class.trials.known_products.MOST_BYTES", most)
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with torch.no_grad(), KnownProducts():
        layer(x)
        for more in range(1, inputs):
            layer(x + more)
        layer.weight.data.zero_()
        assert torch.equal(layer(x), layer.bias.expand(2, 4))
