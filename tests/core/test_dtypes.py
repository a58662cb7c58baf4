"""What weights are kept and computed in, by card, file and class. tests/comfyui/test_hardware.py asks ComfyUI the same."""

import pytest
import torch

from parallel_backend.core.dtypes import compute_dtype, compute_name, native_halves, resolve_dtype, storage_name
from testing.fake_cuda import ADA, AMPERE, BLACKWELL, HOPPER, PASCAL, RDNA2, RDNA3, TURING, TURING_16, VOLTA, fake_cuda

BOTH, FP16_FIRST, BF16_ONLY = ("bf16", "fp16"), ("fp16", "bf16"), ("bf16",)
NEW = [AMPERE, ADA, HOPPER, BLACKWELL, RDNA3]


@pytest.mark.parametrize(
    ("card", "halves"),
    [
        *((card, BOTH) for card in NEW),
        (VOLTA, ("fp16",)),
        (TURING, ("fp16",)),
        (RDNA2, ("fp16",)),
        (TURING_16, ()),
        (PASCAL, ()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_card_computes_in(card, halves):
    with fake_cuda(AMPERE if card.arch is None else RDNA3, card):
        assert native_halves("cuda:1") == halves


@pytest.mark.parametrize(
    ("card", "stored", "allowed", "expected"),
    [
        *((card, "bf16", BOTH, "bf16") for card in NEW),
        *((card, "fp8_e4m3fn", BOTH, "fp8_e4m3fn") for card in NEW),
        (ADA, "fp8_e4m3fn", FP16_FIRST, "fp8_e4m3fn/fp16"),  # Wan
        (ADA, "fp16", BF16_ONLY, "bf16"),  # such as Qwen-Image, which overflows in fp16
        (ADA, "fp32", BOTH, "fp32"),
        (TURING, "bf16", BOTH, "fp16"),
        (TURING, "fp8_e4m3fn", BOTH, "fp8_e4m3fn/fp16"),
        (TURING, "bf16", BF16_ONLY, "bf16/fp32"),
        (TURING, "fp8_e4m3fn", BF16_ONLY, "fp8_e4m3fn/fp32"),
        (TURING_16, "bf16", BOTH, "bf16/fp32"),
        (PASCAL, "fp16", FP16_FIRST, "fp16/fp32"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_default_by_card_file_and_family(card, stored, allowed, expected):
    with fake_cuda(card):
        assert resolve_dtype("default", stored, ("cuda:0",), allowed) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bf16", "fp16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp8_e4m3fn", "fp8_e4m3fn/fp16")],
)
def test_what_is_asked_for_by_name_is_computed_in_what_the_card_can(name, expected):
    with fake_cuda(TURING):
        assert resolve_dtype(name, "bf16", ("cuda:0",), BOTH) == expected
    with fake_cuda(AMPERE):
        assert resolve_dtype(name, "bf16", ("cuda:0",), BF16_ONLY) == name  # fp16 too: the user's risk


def test_all_ranks_compute_in_the_same():
    """What one rank sends, the next one receives by shape and dtype."""
    with fake_cuda(AMPERE, TURING):
        assert resolve_dtype("default", "bf16", ("cuda:0", "cuda:1"), BOTH) == "fp16"
        assert resolve_dtype("default", "bf16", ("cuda:0", "cuda:0"), BOTH) == "bf16"
        assert resolve_dtype("fp8_e4m3fn", "bf16", ("cuda:0", "cpu"), BOTH) == "fp8_e4m3fn/fp32"
        assert resolve_dtype("default", "bf16", ("cuda:0", "cpu"), BOTH) == "fp32"
        assert resolve_dtype("default", "bf16", ("cuda:1", "cuda:1"), BOTH, native=BOTH) == "bf16"  # as ComfyUI was told


@pytest.mark.parametrize(
    ("name", "storage", "on_cuda", "on_cpu"),
    [
        ("bf16", "bf16", "bf16", "bf16"),
        ("fp8_e4m3fn", "fp8_e4m3fn", "bf16", "fp32"),
        ("fp8_e4m3fn/fp16", "fp8_e4m3fn", "fp16", "fp16"),
        ("bf16/fp32", "bf16", "fp32", "fp32"),
    ],
)
def test_a_name_says_how_weights_are_stored_and_computed(name, storage, on_cuda, on_cpu):
    assert (storage_name(name), compute_name(name), compute_name(name, "cpu")) == (storage, on_cuda, on_cpu)
    assert (
        compute_dtype(name, torch.device("cuda:0"))
        == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[on_cuda]
    )
