"""Shapes of an adapter's factors: whether they can be multiplied, and what their product has room for.

The kinds are LoRA (arXiv 2106.09685), LoHa (arXiv 2108.06098) and LoKr (as in LyCORIS, arXiv 2309.14859), with their factors
in the order in which ComfyUI's adapters have them in `weights`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]
"""A factor's."""


class Disagreement(Exception):
    """Factors that cannot be multiplied. Its text has their shapes."""


def why_unfit(kind: str, factors: Sequence[Any], region: Shape) -> str | None:
    """What is wrong with an adapter for a part of a weight of the shape `region`, as a sentence's subject. None: nothing.

    `kind`: "lora", "loha" or "lokr". `factors`: the adapter's `weights`, in which other things than tensors are skipped.
    """
    shapes = [tuple(factor.shape) if isinstance(factor, torch.Tensor) else None for factor in factors]
    title = {"lora": "LoRA", "loha": "LoHa", "lokr": "LoKr"}[kind]
    if any(shape is not None and 0 in shape for shape in shapes):
        return f"a {title} without a rank"
    try:
        made = _PRODUCTS[kind](shapes)
    except Disagreement as error:
        return f"a {title} whose factors do not fit each other ({error})"
    if math.prod(made) != math.prod(region):
        return f"a {title} for a weight of {list(made)}, where this model has {list(region)},"
    return None


def _lora(shapes: Sequence[Shape | None]) -> Shape:
    up, down, _, mid, *_ = shapes
    if up is None or down is None or len(up) < 2 or len(down) < 2:
        raise Disagreement(f"{_shown(up)} and {_shown(down)}")
    if mid is None:
        return _product(up, down)
    if len(mid) != 4 or mid[0] != down[0] or mid[1] != math.prod((down[0], *down[2:])):
        raise Disagreement(f"{_shown(mid)} between {_shown(up)} and {_shown(down)}")
    return _product(up, (down[0], down[1] * mid[2] * mid[3]))


def _loha(shapes: Sequence[Shape | None]) -> Shape:
    first_a, first_b, _, second_a, second_b, first_core, second_core, *_ = shapes
    first, second = _around(first_a, first_b, first_core), _around(second_a, second_b, second_core)
    if first != second:
        raise Disagreement(f"products of {_shown(first)} and {_shown(second)}")
    return first


def _lokr(shapes: Sequence[Shape | None]) -> Shape:
    left, right, _, left_a, left_b, right_a, right_b, core, *_ = shapes
    left = _around(left_a, left_b, None) if left is None else left
    right = _around(right_a, right_b, core) if right is None else right
    if len(left) != 2 or len(right) not in (2, 4):
        raise Disagreement(f"{_shown(left)} and {_shown(right)}")
    return (left[0] * right[0], left[1] * right[1], *right[2:])


def _around(a: Shape | None, b: Shape | None, core: Shape | None) -> Shape:
    """a @ b, or with a core [i, j, k, l] (Tucker's decomposition) the product of a [i, p], core and b [j, r]: [p, r, k, "
    "l]."""
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        raise Disagreement(f"{_shown(a)} and {_shown(b)}")
    if core is None:
        return _product(a, b)
    if len(core) != 4 or core[:2] != (a[0], b[0]):
        raise Disagreement(f"{_shown(core)} between {_shown(a)} and {_shown(b)}")
    return (a[1], b[1], *core[2:])


def _product(a: Shape, b: Shape) -> Shape:
    """a @ b, both taken as matrices of their first axis and all others."""
    if math.prod(a[1:]) != b[0]:
        raise Disagreement(f"{_shown(a)} and {_shown(b)}")
    return a[0], math.prod(b[1:])


def _shown(shape: Shape | None) -> str:
    return "none" if shape is None else str(list(shape))


_PRODUCTS: dict[str, Callable[[Sequence[Shape | None]], Shape]] = {"lora": _lora, "loha": _loha, "lokr": _lokr}
