"""Parallel VAE Encode gives what VAE Encode gives, and Parallel VAE Decode what VAE Decode does, for every class of VAE."""

import pytest

from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui

LIMIT = 1e-5
"""fp32 rounding, as a part of the largest value."""
TILED = ("encode MiniMax H3",)
WHOLE = {
    "encode too small": "the picture has 8 rows and columns at most, too few for 2 ranks, of 8 each",
    "decode with noise, too little memory": "a device has less than the",
    "decode noisy": "this VAE cannot be cut: its bands differ from the whole by",
    "encode Cosmos, uneven": "this VAE does not take 12 frames evenly",
}


DEFAULT = (
    *(
        "encode SD, batch 2, odd size",
        "encode Wan 2.1",
        "encode HunyuanVideo",
        "decode HunyuanVideo",
        "encode LTX-Video 0.9",
    ),
    *("decode LTX-Video 0.9", "decode with noise, once room is made", *TILED, *WHOLE),
)
"""Pictures, and a video VAE of each way to cut. tests/vaes has all classes on ranks in threads."""
CASES = (
    *DEFAULT,
    *("encode Flux, columns", "encode Flux.2", "encode Wan 2.2", "decode HunyuanVideo, one frame, batch 2"),
    *("encode HunyuanImage 2.1", "decode HunyuanImage 2.1, batch 2", "encode refiner", "decode refiner"),
    *("encode HunyuanVideo 1.5", "decode HunyuanVideo 1.5", "encode LTX-Video 0.9.5", "decode LTX-Video 0.9.5"),
    *("encode LTX-2", "decode LTX-2", "encode Cosmos", "decode Cosmos"),
)


@pytest.fixture(scope="module")
def found(request, inside):
    """Results by case."""
    return inside.run("vae_classes", skip=unselected(request, "case", of=zip(CASES)))[0]


@pytest.mark.parametrize("case", mostly_full(CASES, DEFAULT))
def test_a_class_equals_comfyui(found, measured, case):
    assert set(found) <= {*CASES}, "a case of inside/vae_classes.py is not here"
    result = found[case]
    assert "error" not in result, result
    measured(f"VAE on ranks, largest difference, {case}", result["difference"])
    did = "Encoded" if case.startswith("encode") else "Decoded"
    if case in WHOLE:
        assert result["said"].startswith(f"{did} whole by ComfyUI, since {WHOLE[case]}"), result
    else:
        ranks = 3 if "columns" in case else 2
        what = "tiles" if case in TILED else f"{ranks} bands"
        assert result["said"].startswith(f"{did} in {what} on cpu, cpu"), result
    assert result["difference"] <= LIMIT, result
    assert result["alike"], result
    assert result["spread"] > 0.02, result
