"""What other nodes put on a MODEL, or give a sampler: it works or is left out with a word. No other prompt pays for it."""

import pytest

pytestmark = pytest.mark.comfyui

CASES = ("tiles, bands", "tiles, step cache", "windows, displaced", "tiles, split batch")


@pytest.mark.parametrize("what", ["ComfyUI's", "an object patch"])
def test_compiling_the_model_is_left_to_the_ranks(found, what):
    got = found[f"compile, {what}"]
    assert got["difference"] == 0.0
    assert len(got["told"]) == 1
    assert "To compile them there, turn on compile" in got["told"][0]


@pytest.mark.parametrize("case", CASES)
def test_calls_for_parts_of_the_latent_are_computed_whole_and_exact(found, case):
    """Tiles and context windows: neither cut into bands, nor with keys or forecasts of another part."""
    got = found[case]
    assert got["difference"] <= (0.0 if "displaced" not in case else 2e-5)
    assert found["parts differ from the whole"] > 1e-2  # the control


def test_two_models_of_a_guider_are_on_the_same_ranks_and_the_node_says_why_their_calls_are_whole(found):
    got = found["two models"]
    assert got["difference"] <= 2e-5
    assert ["calls two models" in text for text in got["told"]] == [True]
