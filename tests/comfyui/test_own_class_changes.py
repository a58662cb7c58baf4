"""Nodes that change blocks give on ComfyUI's own class on ranks what they give on ComfyUI's own MODEL: Skip Layer Guidance,
NAG, and KJNodes' WanVideoNAG."""

import pytest

from tests.comfyui.test_families import CASES, save_case

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
LIMIT = 2e-5
EXACT = "PipeFusion with all steps exact"
MODES = ["stages", "split batch", "ulysses", "ring", "tensor", EXACT]
PRODUCTS = ["tensor and ring", "compiled stages"]
SECOND_TEXT = "WanVideoNAG default"
CHANGES = {
    "hunyuan-video": {"every step": MODES, "simple": ["stages"]},
    "flux-dev": {"NAG": [*MODES, *PRODUCTS]},
    "krea2": {"NAG": MODES},
    "SD15": {"NAG": ["split batch"]},
    "qwen-image": {"NAG": ["stages", EXACT]},
    "z-image": {"NAG": ["stages", EXACT]},
    "wan-2.1-t2v": {"NAG": ["stages", EXACT], SECOND_TEXT: [*MODES, *PRODUCTS], "WanVideoNAG batch": ["stages"]},
    "wan-2.1-i2v": {SECOND_TEXT: ["stages", "tensor", EXACT]},
}
NO_EFFECT = "qwen-image, NAG", "wan-2.1-t2v, NAG", "z-image, NAG"
"""Their classes hand no attention over: the node has no effect natively either."""
QUICK = {f"wan-2.1-t2v, {SECOND_TEXT}": (EXACT,)}
"""What the default tier has. All else is Flux.1's there, in test_block_patches.py."""


def cases():
    for model, changes in CHANGES.items():
        for change, mode in ((change, mode) for change, modes in changes.items() for mode in modes):
            is_quick = mode in QUICK.get(f"{model}, {change}", ())
            yield pytest.param(model, change, mode, marks=() if is_quick else pytest.mark.full)


@pytest.fixture(scope="module")
def found(request, inside, base):
    """By "model, change, mode", of one run of ComfyUI for what was selected."""
    wanted: dict[str, dict[str, list[str]]] = {}
    for call in (item.callspec.params for item in request.session.items if item.path == request.path):
        wanted.setdefault(call["model"], {}).setdefault(call["change"], []).append(call["mode"])
    of_families = [case for case in CASES if case.name in wanted]
    for case in of_families:
        save_case(case, base)
    return inside.run("own_class_changes", wanted=wanted, of_families=[case.name for case in of_families])[0]


@pytest.mark.parametrize(("model", "change", "mode"), cases())
def test_changed_blocks_of_a_class_equal_the_native_model(found, measured, model, change, mode):
    case = found[f"{model}, {change}, {mode}"]
    assert "error" not in case, case
    measured(f"own class, changed blocks, {model}, {change}, {mode}", case["share"])
    assert case["share"] <= LIMIT, case
    assert (case["effect"] > 100 * LIMIT) == (f"{model}, {change}" not in NO_EFFECT), case
    assert not any(case["whole because"]), case
