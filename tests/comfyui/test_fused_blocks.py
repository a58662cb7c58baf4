"""Fused forms of modules of ComfyUI's classes compute what the modules do."""

import pytest

from tests.support.requirements import missing

pytestmark = pytest.mark.comfyui
QWEN = ["Attention", "QwenImageTransformerBlock"]
KREA = ["Attention", "DoubleSharedModulation", "RMSNorm", "SingleStreamBlock"]
LIMIT = 2e-6
"""In fp32, as a share of the largest value."""
ROUNDING = 1.1
"""Of the square error that the class has in bf16."""


@pytest.fixture(scope="module")
def found(inside):
    found, _ = inside.run("fused_blocks")
    if not all(found["known"].values()):
        missing(f"forms are for other sources than this ComfyUI's: {found['known']}", expected=False)
    return found


@pytest.mark.parametrize(
    ("name", "forms", "kernels"),
    [
        ("Qwen-Image", QWEN, ["adaln", "rms_rope"]),
        ("Krea 2", KREA, ["apply_rope1", "rms_adaln"]),
        ("MiniMax H3", ["Attention", "DiTBlock"], ["rms_rope_split_half_"]),
    ],
)
def test_a_fused_block_computes_what_the_class_does(found, name, forms, kernels):
    case = found[name]
    assert (case["forms"], case["kernels"]) == (forms, kernels)
    for by in ("torch", "kernels"):
        assert case["fp32"][by] <= LIMIT
        assert case["bf16"][by] <= ROUNDING * case["bf16 unfused"]


def test_a_class_of_another_source_stays_as_it_is(found):
    assert found["another source"] is False
