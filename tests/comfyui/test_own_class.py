"""Models that no family computes run as ComfyUI's own class on ranks, and equal ComfyUI's own MODEL.

In the default tier Flux.1, whose file the other tests of this folder load, shows the same in every mode.
"""

import pytest

pytestmark = pytest.mark.comfyui
LIMIT = 5e-5
"""Of a difference to the native MODEL: what fp32 rounding does in a few steps."""
MODELS = ["aura", "cosmos"]


@pytest.fixture(scope="module")
def found(request, inside):
    """Results by case, of one run of ComfyUI for the models that were selected."""
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {item.callspec.params["model"] for item in ours if "model" in item.callspec.params}
    return inside.run("own_class", models=[model for model in MODELS if model in wanted])[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        *("one rank", "stages", "split batch", "tensor", "tensor, three ranks", "tensor and stages", "again"),
        *("ulysses", "ring", "ulysses, three ranks", "ulysses and ring", "tensor and ulysses"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_native_model(found, model, case):
    assert found[f"{model}, {case}"] <= LIMIT, found[f"{model}, {case}"]


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_pipefusion_where_a_trial_has_proven_it(found, model):
    exact, with_tensor = found[f"{model}, PipeFusion, all warm-up"], found[f"{model}, PipeFusion, tensor, all warm-up"]
    assert exact <= LIMIT and with_tensor <= LIMIT, (exact, with_tensor)
    assert found[f"{model}, PipeFusion, one stage"] <= LIMIT
    one = found[f"{model}, PipeFusion, one warm-up step"]
    assert LIMIT < one <= 0.1, one
    tensor = found[f"{model}, PipeFusion, tensor, one warm-up step"]
    assert abs(tensor - one) <= 1e-3 * one, "tensor ranks change nothing"


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_displaced_patches_where_a_trial_has_proven_it(found, model):
    exact = found[f"{model}, displaced patches, all warm-up"]
    assert exact <= LIMIT, exact
    one = found[f"{model}, displaced patches, one warm-up step"]
    assert LIMIT < one <= 0.1, one


def test_parallel_doctor_without_a_prompt_is_refused(found):
    error = found["Parallel Doctor without a prompt"]["error"]
    assert error.startswith("ValueError: positive: aura.safetensors runs as ComfyUI's own class")
