"""Parallel VAE Encode gives what VAE Encode gives, and Parallel VAE Decode what VAE Decode does, for every class of VAE."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 1e-5
"""fp32 rounding, as a part of the largest value."""
TILED = ("encode MiniMax H3",)
WHOLE = {
    "encode too small": "the picture has 8 rows and columns at most, too few for 2 ranks, of 8 each",
    "decode with noise, too little memory": "a device has less than the",
    "decode noisy": "this VAE's decoder draws noise inside its layers",
    "encode Cosmos, uneven": "this VAE does not take 12 frames evenly",
}


@pytest.fixture(scope="module")
def found(inside):
    """Results by case."""
    return inside.run("vae_classes")[0]


def test_every_class_equals_comfyui(found, measured):
    for case, result in found.items():
        assert "error" not in result, f"{case}: {result}"
        measured(f"VAE on ranks, largest difference, {case}", result["difference"])
        did = "Encoded" if case.startswith("encode") else "Decoded"
        if case in WHOLE:
            assert result["said"].startswith(f"{did} whole by ComfyUI, since {WHOLE[case]}"), f"{case}: {result}"
        else:
            ranks = 3 if "columns" in case else 2
            what = "tiles" if case in TILED else f"{ranks} bands"
            assert result["said"].startswith(f"{did} in {what} on cpu, cpu"), f"{case}: {result}"
        assert result["difference"] <= LIMIT, f"{case}: {result}"
        assert result["alike"], f"{case}: {result}"
        assert result["spread"] > 0.02, f"{case}: {result}"
