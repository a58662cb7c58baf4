"""Models that no family computes run as ComfyUI's own class on ranks, and equal ComfyUI's own MODEL."""

import pytest

pytestmark = pytest.mark.comfyui
LIMIT = 5e-5
"""Of a difference to the native MODEL: what fp32 rounding does in a few steps."""
MODELS = ["aura", "cosmos"]


@pytest.fixture(scope="module")
def found(inside):
    return inside.run("own_class")[0]


@pytest.mark.parametrize(
    "case",
    [
        "one rank",
        "stages",
        "split batch",
        "tensor",
        "tensor, three ranks",
        "tensor and stages",
        "again",
        "scaled fp8, stages",
        "scaled fp8, tensor",
        "Parallelize Model, auto",
        "Parallelize Model, split batch",
        "Parallelize Model, tensor",
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_native_model(found, model, case):
    assert found[f"{model}, {case}"] <= LIMIT, found[f"{model}, {case}"]


@pytest.mark.parametrize(
    "case",
    ["ulysses", "ring", "ulysses, three ranks", "ulysses and ring", "tensor and ulysses", "Parallelize Model, ulysses"],
)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_cut_where_a_trial_has_proven_it(found, model, case):
    assert found[f"{model}, {case}"] <= LIMIT, found[f"{model}, {case}"]


@pytest.mark.parametrize("model", MODELS)
def test_pipefusion_where_a_trial_has_proven_it(found, model):
    exact, with_tensor = found[f"{model}, PipeFusion, all warm-up"], found[f"{model}, PipeFusion, tensor, all warm-up"]
    assert exact <= LIMIT and with_tensor <= LIMIT, (exact, with_tensor)
    assert found[f"{model}, PipeFusion, one stage"] <= LIMIT
    one = found[f"{model}, PipeFusion, one warm-up step"]
    assert LIMIT < one <= 0.1, one
    tensor = found[f"{model}, PipeFusion, tensor, one warm-up step"]
    assert abs(tensor - one) <= 1e-3 * one, "tensor ranks change nothing"


@pytest.mark.parametrize("model", MODELS)
def test_parallelize_model_adds_pipefusion_where_it_is_proven(found, model):
    each = found[f"{model}, Parallelize Model, pipefusion"]
    assert LIMIT < each["share"] <= 0.1 and each["exact since"] is None, each


def test_pipefusion_of_one_prompt_is_tried_with_one_prompt(found):
    assert found["aura, PipeFusion of one prompt"] is None


@pytest.mark.parametrize("model", MODELS)
def test_displaced_patches_where_a_trial_has_proven_it(found, model):
    exact = found[f"{model}, displaced patches, all warm-up"]
    assert exact <= LIMIT, exact
    one = found[f"{model}, displaced patches, one warm-up step"]
    assert LIMIT < one <= 0.1, one


@pytest.mark.parametrize("mode", ["stages", "tensor"])
@pytest.mark.parametrize("model", MODELS)
def test_a_lora_does_what_it_does_natively(found, model, mode):
    case = found[f"{model}, LoRA, {mode}"]
    assert case["difference"] <= LIMIT
    assert case["moved"] > 100 * LIMIT


@pytest.mark.parametrize(
    ("case", "begins"),
    [
        (
            "more tensor ranks than heads",
            "ValueError: tensor_parallel_degree: the layers of aura.safetensors cannot be shared out: its 4 heads",
        ),
        ("all-gather", "ValueError: ulysses_exchange: aura.safetensors runs as ComfyUI's own class"),
        ("Parallel Doctor without a prompt", "ValueError: positive: aura.safetensors runs as ComfyUI's own class"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(found, case, begins):
    assert found[case]["error"].startswith(begins)


def test_parallel_doctor_times_the_modes_that_a_trial_has_proven(found):
    report = found["Parallel Doctor"]
    assert "aura.safetensors: ComfyUI's own class MMDiT, fp32, 6 blocks" in report
    assert all(f"{mode}_degree 2" in report for mode in ("pipefusion", "split_batch", "tensor_parallel", "ulysses", "ring"))
    assert "advice: " in report


@pytest.mark.parametrize("model", MODELS)
def test_auto_takes_a_mode_that_a_trial_has_proven(found, model):
    plain, pipelined = found[f"{model}, auto"], found[f"{model}, auto with PipeFusion"]
    assert plain["share"] <= LIMIT, plain
    assert plain["chosen"] in ("ulysses_degree 2", "ring_degree 2", "tensor_parallel_degree 2"), plain
    assert pipelined["share"] <= 0.1, pipelined
