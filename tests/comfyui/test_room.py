"""ComfyUI is asked to make room on its GPU for the ranks' model and run, before either is refused."""

import pytest

pytestmark = pytest.mark.comfyui


def test_an_idle_model_goes_and_one_in_use_stays(found):
    got = found["too little"]
    assert "error" not in got, got
    assert got["left"] == [0, 100_000_000]
    assert got["asked"][0] >= got["held"]  # the first one is for loading
    assert got["difference"] == 0


def test_what_does_not_fit_all_the_same_is_refused_in_the_widgets_words(found):
    got = found["nothing idle"]
    assert got["error"].startswith("ValueError: model_name: the weights of tiny.safetensors take "), got
