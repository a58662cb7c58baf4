"""Core's Model Sparse Attention on ranks sees tokens in the order of ComfyUI's native model."""

import math

import pytest

from tests.comfyui.test_families import CASES, save_case

pytestmark = pytest.mark.comfyui

H3 = "minimax-h3"
LEAST_OF_H3 = 27
"""Tokens of its video. Text is shorter: what refines it in front of the blocks attends in full."""
SAME = "wan-flow-rvs"
"""The blocks of wan-2.1-t2v, with a sampler under which attention hardly shows."""
SPARSE = {case.name: case for case in CASES if case.row.blocks.segments and not case.native.newer and case.name != SAME}
DEFAULT = ("wan-2.1-t2v", H3)
"""A video alone, and with its sound inside."""
OF_CLASS = ("wan-2.1-t2v",)
"""Run by ComfyUI's own class, too."""
SHOWS, LIMIT = 5e-3, 5e-5


@pytest.fixture(scope="module")
def found(request, comfyui, inside, base):
    names = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    least = {}
    for name in sorted(names):
        if name == H3:
            inside.run("small_files", names=[H3])
            least[H3] = LEAST_OF_H3
        else:
            save_case(SPARSE[name], base)
            least[name] = math.prod(SPARSE[name].row.patching.grid(SPARSE[name].native.latent))
    return inside.run("sparse_attention", names=[*least], least=least, of_class=OF_CLASS)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in (H3, *SPARSE)]
)
def test_ksampler_equals_the_native_model_with_the_same_node(found, name, measured):
    result = found[name]
    assert "error" not in result, result
    assert result["in full"] > SHOWS, "attention of all tokens gives the same"
    if name == H3:  # the node asks for the class
        assert result["told apart"] == [True, True]
    for mode in ("one rank", "ulysses", *(("own class, ulysses",) if name in OF_CLASS else ())):
        measured(f"sparse attention, largest difference, {name}", result[mode])
        assert result[mode] <= LIMIT, mode
