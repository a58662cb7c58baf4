"""What other nodes put on a MODEL, or give a sampler: it works or is left out with a word. No other prompt pays for it."""

import pytest

from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(request, inside):
    skip = unselected(request, "case", of=zip(CASES))
    skip += [f"compile, {what}" for what in unselected(request, "what", of=zip(COMPILED))]
    return inside.run("foreign", skip=skip)[0]


COMPILED = ("ComfyUI's", "an object patch", "every block")


@pytest.mark.parametrize("what", mostly_full(COMPILED, COMPILED[:2]))
def test_compiling_the_model_is_left_to_the_ranks(found, what):
    got = found[f"compile, {what}"]
    assert "error" not in got, got
    assert got["difference"] == 0.0
    assert len(got["told"]) == 1
    assert "To have them compiled there, set compile on the loader" in got["told"][0]


MODES = ("bands", "step cache", "bands and step cache", "displaced", "displaced and step cache", "split batch")

CASES = [*(f"{way}, {mode}" for way in ("tiles", "windows") for mode in MODES), "tiles, bands, unforeseen"]
DEFAULT = ["tiles, bands", "tiles, step cache", "windows, displaced", "tiles, split batch", CASES[-1]]


@pytest.mark.parametrize("case", mostly_full(CASES, DEFAULT))
def test_calls_for_parts_of_the_latent_are_computed_whole_and_exact(found, case):
    """Tiles and context windows: neither cut into bands, nor with keys or forecasts of another part."""
    got = found[case]
    assert "error" not in got, got
    assert got["difference"] <= (0.0 if "displaced" not in case else 2e-5)
    assert found["parts differ from the whole"] > 1e-2  # the control


def test_two_models_of_a_guider_are_on_the_same_ranks_and_the_node_says_why_their_calls_are_whole(found):
    got = found["two models"]
    assert "error" not in got, got
    assert got["difference"] <= 2e-5
    assert ["calls two models" in text for text in got["told"]] == [True]
