"""Layers that are one layer in the file are multiplied together, with the bits of each by itself."""

import pytest
import torch

from parallel_backend.checkpoints.packed_formats import Fp8
from parallel_backend.checkpoints.quantised_formats import quantise_int8
from parallel_backend.rank.stage.joint_products import JointProduct
from parallel_backend.rank.stage.linear import RankLinear
from parallel_backend.rank.stage.quantised_products import KitchenWeight

ROWS, COLUMNS = (64, 64, 192), 256


def layers(kind: str, gap: int = 0) -> tuple[list[RankLinear], torch.Tensor]:
    """Three packed layers whose weights are in a row in memory, with `gap` bytes between them; and that memory."""
    g = torch.Generator().manual_seed(3)
    memory = torch.zeros(len(ROWS) * gap + COLUMNS * sum(ROWS), dtype=torch.uint8)
    found, at = [], 0
    for rows in ROWS:
        layer = torch.nn.Linear(COLUMNS, rows)
        values = torch.randn(rows, COLUMNS, generator=g)
        RankLinear.adopt(torch.nn.ModuleList([layer]))
        if kind == "int8":
            packed, packing = quantise_int8(values)
        else:
            packed, packing = values.to(torch.float8_e4m3fn).view(torch.uint8), Fp8("fp8_e4m3fn", full_precision=True)
        place = memory[at : at + packed.numel()].view(packed.shape)
        at += packed.numel() + gap
        layer.pack(place.copy_(packed), packing, torch.float32)
        found.append(layer.requires_grad_(False))
    return found, memory


def joined(together: list[RankLinear]) -> JointProduct:
    product = JointProduct(together)
    for layer in together:
        layer.joint = product
    return product


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """Rows of each product that comfy-kitchen computes."""
    rows: list[int] = []
    linear = KitchenWeight.linear

    def noted(weight: KitchenWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(weight.weight.shape[0])
        return linear(weight, x, bias)

    monkeypatch.setattr(KitchenWeight, "linear", noted)
    return rows


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
@torch.inference_mode()
def test_one_product_for_all(products, order):
    together, _ = layers("int8")
    x = torch.randn(2, 5, COLUMNS)
    apart = [layer(x) for layer in together]
    joined(together)
    products.clear()
    for _ in range(2):
        for index in order:
            assert (together[index](x) == apart[index]).all()
    assert products == 2 * [sum(ROWS)]


@torch.inference_mode()
def test_other_inputs_end_it(products):
    """The model's code calls one of the layers with another tensor, as with old keys."""
    together, _ = layers("int8")
    x, other = torch.randn(5, COLUMNS), torch.randn(5, COLUMNS)
    calls = ((0, x), (1, other), (2, x), (0, other))
    apart = [together[index](each) for index, each in calls]
    joined(together)
    products.clear()
    assert all((together[index](each) == out).all() for (index, each), out in zip(calls, apart, strict=True))
    assert products == [sum(ROWS), ROWS[1], ROWS[2], ROWS[0]]


@torch.inference_mode()
def test_weights_that_move_and_biases_that_change(products):
    together, memory = layers("int8")
    x = torch.randn(5, COLUMNS)
    product = joined(together)
    before = [layer(x) for layer in together]
    together[1].bias += 1.0  # as LoRAs change it
    other, at = memory.flip(0).clone(), 0
    for layer in together:
        size = layer.packed.numel()
        layer.move(other[at : at + size].view(layer.packed.shape), layer.packing.tensors)
        at += size
    after = [layer(x) for layer in together]
    assert product._weight is not None
    assert not any((one == two).all() for one, two in zip(before, after, strict=True))
    for layer, found in zip(together, after, strict=True):
        layer.joint = None
        assert (layer(x) == found).all()


@pytest.mark.parametrize(("kind", "gap"), (("int8", 64), ("fp8", 0)), ids=("apart in memory", "expanded"))
@torch.inference_mode()
def test_what_cannot_be_joined_is_not(products, kind, gap):
    together, _ = layers(kind, gap=gap)
    x = torch.randn(5, COLUMNS)
    apart = [layer(x) for layer in together]
    joined(together)
    products.clear()
    assert all((layer(x) == found).all() for layer, found in zip(together, apart, strict=True))
    assert sum(ROWS) not in products
