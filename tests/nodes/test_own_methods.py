"""Methods of ComfyUI's own class, such as that for a prompt's text, are computed once for all that they are given."""

import importlib

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import draw_weights
from tests.support.planted_comfyui import planted, planted_comfyui

METHOD = "preprocess_text_embeds"
TEXT, IDS, FACTORS = torch.randn(1, 5, 16), torch.arange(4)[None], torch.ones(1, 4, 1)


@pytest.fixture
def native_text(module):
    class Adding(module("model.call.own_methods").OwnMethods):
        def _compute(self, _method, _patches, text, *_more, **_named):
            return text + 1

    return Adding(None, torch.float32)


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("patched", (TEXT, IDS), {"t5xxl_weights": FACTORS}),
        (None, (TEXT + 1, IDS), {"t5xxl_weights": FACTORS}),
        (None, (TEXT, IDS + 1), {"t5xxl_weights": FACTORS}),
        (None, (TEXT, IDS), {"t5xxl_weights": 2 * FACTORS}),
    ],
    ids=["patches", "text", "tokens", "weights"],
)
def test_what_was_given_again_is_kept_and_anything_else_is_computed(native_text, name, given, named):
    first = native_text.computed(METHOD, {}, None, TEXT, IDS, t5xxl_weights=FACTORS)
    assert native_text.computed(METHOD, {}, None, TEXT.clone(), IDS.clone(), t5xxl_weights=FACTORS.clone()) is first
    assert native_text.computed(METHOD, {}, name, *given, **named) is not first
    assert native_text.computed("another", {}, None, TEXT, IDS, t5xxl_weights=FACTORS) is not first
    assert native_text.computed(METHOD, {}, None, TEXT, IDS, t5xxl_weights=FACTORS) is first


def test_an_own_class_computes_text_with_the_weights_that_it_needs(module, tmp_path):
    """And with a LoRA of one that it reads without calling the layer."""
    kind, lora = module("model.call.own_methods").OwnMethods, importlib.import_module("comfy.weight_adapter").LoRAAdapter
    with planted_comfyui():
        model, g = build(planted("RefinesText")), torch.Generator().manual_seed(2)
        draw_weights(model, 1)
        save_file(state := model.state_dict(), path := tmp_path / "own.safetensors")
        read = []

        class Noting(kind):
            def _read(self, *given):
                read.append(given[-1])
                return super()._read(*given)

        text, factors = (
            torch.randn(2, 5, 16, generator=g),
            (torch.randn(16, 4, generator=g), torch.randn(4, 16, generator=g)),
        )
        native_text = Noting(open_own_class(path, planted("RefinesText")), torch.float32)
        assert torch.equal(
            native_text.computed(METHOD, {}, None, text, twice=True), model.preprocess_text_embeds(text, twice=True)
        )
        assert read == ["", "refiner", "refiner.one", "refiner.two"]
        state["refiner.two.weight"] += 0.5 * factors[0] @ factors[1]
        patches = {
            "diffusion_model.refiner.two.weight": [(0.5, lora(set(), (*factors, None, None, None, None)), 1.0, None, None)]
        }
        found = native_text.computed(METHOD, patches, "patched", text)
        assert (found - model.preprocess_text_embeds(text)).abs().max() < 1e-6
