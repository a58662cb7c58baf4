"""Core's Model Sparse Attention on ranks sees tokens in the order of ComfyUI's native model, in every family that has it."""

import math
from dataclasses import replace

import pytest

from tests.comfyui.conftest import mostly_full
from tests.comfyui.test_families import CASES, has_class, save_case

pytestmark = pytest.mark.comfyui

PRUNED = next(case for case in CASES if case.name == "minimax-h3-pruned")
FAST = replace(
    PRUNED,
    name="minimax-h3-fast",
    config=PRUNED.config | {"gate_compress": True},
    native=replace(PRUNED.native, config=PRUNED.native.config | {"gate_compress": True}),
)
"""FastH3's layer for VSA is in the file. An older ComfyUI, as here, drops it."""
OTHERS = (case for case in CASES if case.row.blocks.segments and not case.native.newer)
SPARSE = [FAST, *OTHERS]
DEFAULT = ("minimax-h3-fast",)
"""A video with its sound inside."""
OF_CLASS = ("minimax-h3-fast",)
"""Run by ComfyUI's own class, too."""
CLASSES = {"wan-2.1-t2v": 36, "wan-2.2-fun-control": 48, "wan-bernini": 36}
"""Of no family: a video alone, behind a picture, in front of others. With the tokens from which on attention is sparse."""
LIMIT, SHOWS = 5e-5, 5e-3


@pytest.fixture(scope="module")
def found(request, comfyui, inside, base):
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    of_families = {each["case"].name: each["case"] for each in chosen if "case" in each}
    cases = [case for case in of_families.values() if has_class(comfyui, case)]
    classes = [each["name"] for each in chosen if "name" in each]
    inside.run("small_files", names=classes)
    for case in cases:
        save_case(case, base)
    # Text is shorter: what refines it in front of the blocks attends in full.
    least = {case.name: math.prod(case.row.patching.grid(case.native.latent)) for case in cases}
    least |= {name: CLASSES[name] for name in classes}
    return inside.run("sparse_attention", names=sorted(least), least=least, of_class=OF_CLASS)[0]


@pytest.mark.parametrize("name", mostly_full(CLASSES, ("wan-2.1-t2v",)))
def test_a_class_of_no_family_equals_the_native_model_with_the_same_node(found, name, measured):
    result = found[name]
    assert "error" not in result, result
    assert result["in full"] > SHOWS, "attention of all tokens gives the same"
    for mode in ("one rank", "ulysses"):
        measured(f"sparse attention, largest difference, {name}", result[mode])
        assert result[mode] <= LIMIT, mode


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in DEFAULT else pytest.mark.full) for case in SPARSE],
)
def test_ksampler_equals_the_native_model_with_the_same_node(found, case, measured):
    result = found[case.name]
    assert "error" not in result, result
    assert result["in full"] > SHOWS, "attention of all tokens gives the same"
    if case.family == "minimax-h3":  # the node asks for the class
        assert result["told apart"] == [True, True]
    for mode in ("one rank", "ulysses", *(("own class, ulysses",) if case.name in OF_CLASS else ())):
        measured(f"sparse attention, largest difference, {case.name}", result[mode])
        assert result[mode] <= case.native.limit, mode
