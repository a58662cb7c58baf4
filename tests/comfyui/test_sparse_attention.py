"""Core's Model Sparse Attention on ranks sees tokens in the order of ComfyUI's native model."""

import pytest

pytestmark = pytest.mark.comfyui

H3 = "minimax-h3"
CLASSES = {"wan-2.1-t2v": 36, H3: 27}
"""A video alone, and with its sound inside. With the video's tokens, from
which on attention is sparse: text is shorter, and what refines it in front of the blocks attends in full."""
LIMIT, SHOWS = 5e-5, 5e-3


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("sparse_attention", least=CLASSES)[0]


@pytest.mark.parametrize("name", CLASSES)
def test_ksampler_equals_the_native_model_with_the_same_node(found, name):
    result = found[name]
    assert result["in full"] > SHOWS, "attention of all tokens gives the same"
    if name == H3:  # the node asks for the class
        assert result["told apart"] == [True, True]
    for mode in ("one rank", "ulysses"):
        assert result[mode] <= LIMIT, mode
