"""What other nodes put on a MODEL, or give a sampler: it works or is left out with a word. No other prompt pays for it."""

import pytest

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("foreign")[0]


@pytest.mark.parametrize("what", ["ComfyUI's", "every block", "an object patch"])
def test_compiling_the_model_is_left_to_the_ranks(found, what):
    got = found[f"compile, {what}"]
    assert "error" not in got, got
    assert got["difference"] == 0.0
    assert len(got["told"]) == 1
    assert "To have them compiled there, set compile on the loader" in got["told"][0]
