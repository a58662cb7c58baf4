"""What other nodes put on a MODEL reaches the ranks as it does the native model, or is refused by the node's name."""

import pytest

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
CACHES = "Use Parallel Step Cache instead"
PACK = " (meddling_nodes)"
REFUSED = {  # node -> what is said of it
    "ForwardCache": ("MeddlingForwardCache", "another 'forward_orig' in ComfyUI's model", CACHES),
    "BlockCompile": ("MeddlingBlockCompile", "another 'diffusion_model.double_blocks.0'", "Turn on `compile`"),
    "LayerPatch": ("MeddlingLayerPatch", "another 'img_in.forward' in ComfyUI's model", "Remove the node"),
    "OwnKernel": ("MeddlingOwnKernel", "an attention kernel set on the MODEL", "by attention in Ulysses Config"),
    "ModelComputeDtype": ("ModelComputeDtype", "computing in another dtype (torch.bfloat16)", "Choose weight_dtype"),
    "BlockWrapper": ("MeddlingBlockWrapper", "another 'double_blocks.0.forward' in ComfyUI's model", "Remove the node"),
}


def test_equals_the_native_model_with_the_same_nodes(found):
    """Others of ComfyUI's own are in tests/campaigns/test_compatibility.py."""
    got = found["RIFLEx and ScaleROPE"]
    assert got["moved"] > 200 * LIMIT
    assert got["difference"] <= LIMIT


@pytest.mark.parametrize("node", REFUSED)
def test_what_cannot_reach_the_ranks_is_refused_by_the_nodes_name(found, node):
    name, what, instead = REFUSED[node]
    error = found.error(node)
    assert error.startswith("ValueError: model: "), found[node]
    for part in (name, what, instead, PACK if name.startswith("Meddling") else ""):
        assert part in error


@pytest.mark.parametrize(
    "node",
    ["Nothing", "Wrapper", "ModelAttentionBackend", "QwenImage21Cache", "current_patcher", "after the refusals"],
)
def test_what_changes_nothing_passes(found, node):
    assert found[node] == 0.0
