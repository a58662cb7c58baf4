"""Factors of adapters that cannot be multiplied are seen by their shapes, before anything is sent to a rank."""

import importlib.util
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "nodes" / "model" / "adapter_factors.py"
ones = torch.ones
R, ROWS, COLUMNS = 4, 32, 48
REGION = (ROWS, COLUMNS)
TUCKER = {"up": ones(ROWS, R, 1, 1), "down": ones(R, 16, 1, 1), "mid": ones(R, R, 3, 3)}


def load():
    """The module alone: the package `nodes` needs ComfyUI."""
    spec = importlib.util.spec_from_file_location("adapter_factors", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


why_unfit = load().why_unfit
FITS = {
    "a LoRA": ("lora", (ones(ROWS, R), ones(R, COLUMNS), 1.0, None, None, None), REGION),
    "a LoRA of a convolution": ("lora", (ones(ROWS, R, 1, 1), ones(R, 16, 3, 3), None, None, None, None), (ROWS, 16, 3, 3)),
    "a LoRA with a third factor": (
        "lora",
        (TUCKER["up"], TUCKER["down"], None, TUCKER["mid"], None, None),
        (ROWS, 16, 3, 3),
    ),
    "a LoHa": ("loha", (ones(ROWS, R), ones(R, COLUMNS), 1.0, ones(ROWS, 2), ones(2, COLUMNS), None, None, None), REGION),
    "a LoHa with cores": (
        "loha",
        (ones(R, ROWS), ones(R, 16), 1.0, ones(R, ROWS), ones(R, 16), ones(R, R, 3, 3), ones(R, R, 3, 3), None),
        (ROWS, 16, 3, 3),
    ),
    "a LoKr": ("lokr", (ones(4, 6), ones(8, 8), 1.0, None, None, None, None, None, None), REGION),
    "a LoKr of factors": ("lokr", (None, None, 1.0, ones(4, 2), ones(2, 6), ones(8, 3), ones(3, 8), None, None), REGION),
}


@pytest.mark.parametrize("case", FITS)
def test_what_fits_is_taken(case):
    kind, factors, region = FITS[case]
    assert why_unfit(kind, factors, region) is None


@pytest.mark.parametrize("case", FITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_any_factor_of_another_size_is_seen(case, axis):
    kind, factors, region = FITS[case]
    for index, factor in enumerate(factors):
        if isinstance(factor, torch.Tensor):
            for size in (factor.shape[axis] + 1, 0):
                other = ones([size if each == axis else length for each, length in enumerate(factor.shape)])
                why = why_unfit(kind, [*factors[:index], other, *factors[index + 1 :]], region)
                assert why is not None, (index, other.shape)
                assert size == 0 or "[" in why, "shapes are named"
            missing = [*factors[:index], None, *factors[index + 1 :]]
            assert why_unfit(kind, missing, region) is not None
            assert why_unfit(kind, [*factors[:index], ones(()), *factors[index + 1 :]], region) is not None


def test_both_shapes_are_in_the_words():
    why = why_unfit("lora", (ones(256, 8), ones(4, 256), None, None, None, None), (256, 256))
    assert why == "a LoRA whose factors do not fit each other ([256, 8] and [4, 256])"
    assert why_unfit("lora", (ones(256, 4), ones(4, 128), None, None, None, None), (256, 256)) == (
        "a LoRA for a weight of [256, 128], where this model has [256, 256],"
    )
