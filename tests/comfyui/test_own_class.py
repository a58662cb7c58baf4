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
def test_tokens_are_cut_where_a_trial_has_proven_it(found, case):
    assert found[f"aura, {case}"] <= LIMIT, found[f"aura, {case}"]
    widget = "ring_degree" if "ring" in case else "ulysses_degree"
    begins = f"ValueError: {widget}: the tokens of cosmos.safetensors cannot be cut: it does not run where"
    assert found[f"cosmos, {case}"]["error"].startswith(begins)


def test_pipefusion_where_a_trial_has_proven_it(found):
    assert found["aura, PipeFusion, all warm-up"] <= LIMIT, found["aura, PipeFusion, all warm-up"]
    assert found["aura, PipeFusion, tensor, all warm-up"] <= LIMIT, found["aura, PipeFusion, tensor, all warm-up"]
    one = found["aura, PipeFusion, one warm-up step"]
    assert LIMIT < one <= 0.1, one
    assert abs(found["aura, PipeFusion, tensor, one warm-up step"] - one) <= 1e-3 * one, "tensor ranks change nothing"
    begins = (
        "ValueError: model: cosmos.safetensors cannot run in PipeFusion's patches: it does not run where its tokens are cut"
    )
    assert found["cosmos, PipeFusion, one warm-up step"]["error"].startswith(begins)


def test_parallelize_model_adds_pipefusion_where_it_is_proven(found):
    aura, cosmos = (found[f"{model}, Parallelize Model, pipefusion"] for model in MODELS)
    assert LIMIT < aura["share"] <= 0.1 and aura["exact since"] is None, aura
    assert cosmos["share"] <= LIMIT and cosmos["exact since"].startswith("it does not run where its tokens are cut"), cosmos


def test_pipefusion_of_one_prompt_is_tried_with_one_prompt(found):
    assert found["aura, PipeFusion of one prompt"] is None


def test_displaced_patches_where_a_trial_has_proven_it(found):
    assert found["aura, displaced patches, all warm-up"] <= LIMIT, found["aura, displaced patches, all warm-up"]
    one = found["aura, displaced patches, one warm-up step"]
    assert LIMIT < one <= 0.1, one
    begins = "ValueError: patch_degree: the tokens of cosmos.safetensors cannot be cut: it does not run where"
    assert found["cosmos, displaced patches, one warm-up step"]["error"].startswith(begins)


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
            "three tensor ranks",
            "ValueError: tensor_parallel_degree: the layers of aura.safetensors cannot be shared out: its 4 heads",
        ),
        ("all-gather", "ValueError: ulysses_exchange: aura.safetensors runs as ComfyUI's own class"),
        (
            "PipeFusion",
            "ValueError: model: with a pipefusion_degree of 1 PipeFusion works for models that Parallel DiT computes itself",
        ),
        ("Parallel Doctor without a prompt", "ValueError: positive: aura.safetensors runs as ComfyUI's own class"),
        ("Parallel Self-Test", "ValueError: model: Parallel Self-Test tries the files of models that"),
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
    """Cosmos 1 has no cut of tokens, so that stages are all that two ranks can have of one prompt, but for tensor ranks."""
    plain, pipelined = found[f"{model}, auto"], found[f"{model}, auto with PipeFusion"]
    assert plain["share"] <= LIMIT, plain
    of_tokens = ("ulysses_degree 2", "ring_degree 2", "tensor_parallel_degree 2")
    assert plain["chosen"] in (of_tokens if model == "aura" else ("one rank", "tensor_parallel_degree 2")), plain
    assert pipelined["share"] <= 0.1, pipelined
    assert model == "aura" or pipelined["share"] <= LIMIT, pipelined
