"""What nodes do with inputs that nobody should give them: each case is a call inside ComfyUI, see inside/inputs.py."""

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

NODES = (
    *("ParallelDiTLoader", "UlyssesConfig", "PipeFusionSampler", "ApplyPipeFusion", "QuickstartPrompt", "QuickstartDecode"),
    *("UnloadParallelDiT", "ParallelVAEDecode", "ParallelVAEEncode", "ParallelTrace", "ParallelStepCache"),
)


@pytest.mark.parametrize("name", NODES)
def test_odd_inputs_are_refused_by_name_or_give_the_right_result(found, name):
    got = found[name]
    assert "error" not in got, got.get("traceback", got)
    assert sum(got.values()) == 24
    if name != "UnloadParallelDiT":
        assert got["refused"] > 5  # the control: some inputs cannot be taken


@pytest.mark.parametrize("name", [*NODES, "KSampler", "strengths"])
def test_the_next_prompt_is_the_same_as_before(found, name):
    assert found[f"after {name}"] == 0.0, found[f"after {name}"]


def test_our_model_under_the_native_sampler_does_as_the_native_one(found):
    assert found["the native model's"] < 1e-4
    got = found["KSampler"]
    assert "error" not in got, got.get("traceback", got)
    assert got["done"] > 5 and got["refused"] > 5


def test_a_strength_that_is_no_number_is_refused(found):
    got = found["strengths"]
    for strength in ("nan", "inf"):
        assert got[strength].startswith("model: "), got
    assert got["0.0"] == "done"
    assert "not finite" in got["1e+30"] or "NaN" in got["1e+30"], got


def test_nothing_is_written_outside(found, base):
    inside = {path.name for path in base.parent.iterdir()}
    assert {path.rpartition("/")[2] for path in found["outside"]} <= inside
