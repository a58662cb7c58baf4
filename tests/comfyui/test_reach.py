"""What other nodes put on a MODEL reaches the ranks as it does the native model, or is refused by the node's name."""

import pytest

from tests.comfyui.conftest import unselected
from tests.comfyui.test_families import CASES, has_class, save_case, skip_without_class

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
CACHES = "Take Parallel Step Cache in its place"
REMOVE = "Remove the node that adds it"
PACK = " (meddling_nodes)"
REFUSED = {  # node -> what is said of it
    "BlockCache": ("First Block Cache", "another 'double_blocks' in the native model", CACHES),
    "ForwardCache": ("MeddlingForwardCache", "another 'forward_orig' in the native model", CACHES),
    "ForwardPatch": ("MeddlingForwardPatch", "another 'diffusion_model.forward'", REMOVE),
    "BlockCompile": ("MeddlingBlockCompile", "another 'diffusion_model.double_blocks.0'", "Switch on `compile`"),
    "OtherClass": ("MeddlingOtherClass", "another '__class__' in the native model", REMOVE),
    "KnownClass": ("MeddlingKnownClass", "another 'diffusion_model.style'", REMOVE),
    "LayerPatch": ("MeddlingLayerPatch", "another 'img_in.forward' in the native model", "Remove the node"),
    "AttentionPatch": ("MeddlingAttentionPatch", "model patch 'attn1_patch'", REMOVE),
    "AttentionReplacement": ("MeddlingAttentionReplacement", "attention replacement 'dit'", REMOVE),
    "OwnKernel": ("MeddlingOwnKernel", "an attention kernel set on the MODEL", "Ulysses Config's widget attention"),
    "Injection": ("MeddlingInjection", "what another node injects into the model", "Remove that node"),
    "BlockWrapper": ("MeddlingBlockWrapper", "another 'double_blocks.0.forward' in the native model", "Remove the node"),
}
FROM_COMFYUI = {
    "ModelComputeDtype": ("ModelComputeDtype", "computing in another dtype (torch.bfloat16)", "Choose weight_dtype"),
}
REFUSING_SCALES = ("wan-animate-2",)
"""Families that do not scale positions, where ComfyUI's own model does."""
CHANGES = [
    *(("tiny.safetensors", name) for name in ("EasyCache", "LazyCache", "ScaleROPE")),
    *(
        ("wan-2.1-t2v.safetensors", name)
        for name in ("EasyCache", "LazyCache", "ScaleROPE", "RIFLEx", "RIFLEx and ScaleROPE")
    ),
    ("tiny-sd3.safetensors", "LazyCache"),
]
DEFAULT = [
    ("tiny.safetensors", "EasyCache"),
    ("tiny.safetensors", "ScaleROPE"),
    ("wan-2.1-t2v.safetensors", "RIFLEx and ScaleROPE"),
]
CACHES_OF = [each for each in CHANGES if each[1].endswith("Cache")]
IGNORED = [("tiny-sd3.safetensors", "ScaleROPE"), ("tiny-sd3.safetensors", "EasyCache")]


def rows(changes: list, default: list) -> list:
    return [pytest.param(*each, marks=() if each in default else pytest.mark.full) for each in changes]


@pytest.fixture(scope="module")
def found(request, inside):
    skip = [each.replace(", ", " ") for each in unselected(request, "file", "change", of=[*CHANGES, *IGNORED])]
    inside.run("small_files", names=["wan-2.1-t2v"])
    return inside.run("reach", skip=skip)[0]


@pytest.mark.parametrize(("file", "change"), rows(CHANGES, DEFAULT))
def test_equals_the_native_model_with_the_same_node(found, measured, file, change):
    got = found[f"{file} {change}"]
    assert "error" not in got, got
    assert got["moved"] > 200 * LIMIT
    measured(f"{change}, largest difference to ComfyUI's own model", got["difference"])
    assert got["difference"] <= LIMIT


@pytest.mark.parametrize(("file", "change"), rows(CACHES_OF, DEFAULT))
def test_a_cache_of_another_node_sees_whole_calls_under_pipefusion(found, file, change):
    got = found[f"{file} {change}"]
    assert got["difference, banded"] <= LIMIT
    assert len(got["whole because"]) == 1
    assert got["whole because"][0] is not None


@pytest.mark.parametrize(("file", "change"), rows(IGNORED, IGNORED[:1]))
def test_what_a_native_model_takes_no_notice_of_is_ignored(found, file, change):
    got = found[f"{file} {change}"]
    assert got["moved"] == 0.0
    assert got["difference"] <= LIMIT


@pytest.mark.parametrize("node", [*REFUSED, *FROM_COMFYUI])
def test_what_cannot_reach_the_ranks_is_refused_by_the_nodes_name(found, node):
    name, what, instead = REFUSED.get(node) or FROM_COMFYUI[node]
    error = found[node]["error"]
    assert error.startswith("ValueError: model: "), found[node]
    for part in (name, what, instead, *([PACK] if node in REFUSED else [])):
        assert part in error


@pytest.mark.parametrize(
    "node",
    ["Nothing", "Note", "Wrapper", "ModelAttentionBackend", "QwenImage21Cache", "current_patcher", "after the refusals"],
)
def test_what_changes_nothing_passes(found, node):
    assert found[node] == 0.0


@pytest.fixture(scope="module")
def around(request, comfyui, inside, base):
    """Results by case, of one run of ComfyUI for those cases that were selected."""
    calls = [
        item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    cases = (params["case"] for params in calls if "case" in params)
    selected = {case.name: case for case in cases if has_class(comfyui, case)}
    for case in selected.values():
        save_case(case, base)
    return inside.run("around", names=sorted(selected))[0]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scaled_positions_and_a_wrapper_are_as_in_the_native_model(comfyui, around, case):
    skip_without_class(comfyui, case)
    got = around[case.name]
    if "'rope_options' of transformer_options" in got.get("error", ""):
        assert case.family in REFUSING_SCALES
        return
    assert "error" not in got, got
    assert got["saw"] == got["native saw"]
    assert got["difference"] <= max(case.native.limit, LIMIT)
