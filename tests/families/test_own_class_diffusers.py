"""diffusers' classes on ranks through the door of ComfyUI's: equal to diffusers itself in every mode that a trial proves."""

import json
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_flux
from safetensors.torch import save_file

from parallel_backend.client.proven_class import call_of, prompt_for_class, proven
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass, OwnForm
from parallel_backend.families.own_class import attention_calls
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.diffusers_form import pack
from parallel_backend.families.own_class.trial import trial
from testing import tiny

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5
FLUX = OwnForm((("context", "encoder_hidden_states"), ("pooled", "pooled_projections")), 2, ("img_ids", "txt_ids"))
FLUX2 = OwnForm((("context", "encoder_hidden_states"),), 2, ("img_ids", "txt_ids"), axes=4, counts_text=True)
SD3 = OwnForm((("context", "encoder_hidden_states"), ("pooled", "pooled_projections")))


def diffusers_class(model: torch.nn.Module, config: dict[str, Any], form: OwnForm) -> OwnClass:
    kind, halves = type(model), ("bf16", "fp16")
    return OwnClass("", "", kind.__module__, kind.__name__, json.dumps(config), (), (), (), halves, False, form=form)


MODES = (
    Degrees(pipe=2),
    Degrees(batch=2),
    Degrees(ulysses=2),
    Degrees(ring=3),
    Degrees(pipe=2, ulysses=2),
    Degrees(patch=2, patch_mode="displaced"),
    Degrees(tensor=2),
    Degrees(tensor=2, ring=2),
    Degrees(tensor=2, pipe=2),
)


@pytest.mark.slow
def test_every_mode_equals_diffusers(pools, flux_model, tmp_path):
    """Whole calls, and runs in bands or displaced patches with exact steps."""
    own = diffusers_class(flux_model, tiny.FLUX, FLUX)
    save_file(flux_model.state_dict(), path := tmp_path / "flux.safetensors")
    x, _, tensors = tiny.inputs(height=15, width=11)
    whole = tiny.reference(flux_model, x, torch.ones(2), tensors)
    prompt, sigmas = prompt_for_class(Prompt(tensors, tensors, 1.0)), linear_sigmas(1)
    tried = {tensor: proven(own, call_of(x, tensors), Degrees(tensor=tensor), "Flux") for tensor in (1, 2)}
    for degrees in MODES:
        model = pools.load(path, degrees, own=tried[degrees.tensor])
        bands = 1 if degrees.displaced else 3
        samples = sample_whole(model, x, sigmas, prompt), sample_in_bands(model, x, sigmas, prompt, bands, 1)[0]
        assert all(tiny.relative(x - sample, whole) <= TOLERANCE for sample in samples), degrees


def test_attention_that_is_not_seen_is_refused():
    """SD3's class calls torch's function itself."""
    config = {
        "sample_size": 8,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 12,
        "pos_embed_max_size": 40,
    }
    model = tiny.randomise(diffusers.SD3Transformer2DModel(**config).eval(), 0)
    own = diffusers_class(model, config, SD3)
    x, _, tensors = tiny.inputs()
    call = call_of(x, {name: tensors[name] for name in ("context", "pooled")})
    proof = trial(own, call, (1.0,), bands=True)
    assert proof.stages == ""
    assert proof.sequence.startswith("its attention cannot be reached")


@pytest.fixture
def causal(monkeypatch):
    """Flux's blocks attend to the tokens before alone."""
    attention_calls._replaced.cache_clear()  # it knows by which names modules have the function
    dispatch = transformer_flux.dispatch_attention_fn
    monkeypatch.setattr(transformer_flux, "planted", dispatch, raising=False)
    by_order = lambda *args, **kwargs: transformer_flux.planted(*args, is_causal=True, **kwargs)  # noqa: E731
    monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", by_order)
    yield
    attention_calls._replaced.cache_clear()


def test_causal_attention_is_refused(causal):
    """Ranks have tokens in another order."""
    x, _, tensors = tiny.inputs()
    proof = trial(diffusers_class(tiny.random_flux(), tiny.FLUX, FLUX), call_of(x, tensors), (1.0,), bands=True)
    assert (proof.stages, proof.sequence) == ("", "its attention is causal")
    assert proof.latent is None


@pytest.mark.slow
def test_a_class_whose_places_have_four_axes():
    config = {
        "in_channels": 64,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 8,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    }
    x, _, tensors = tiny.inputs()
    model, context = tiny.randomise(diffusers.Flux2Transformer2DModel(**config).eval(), 0), tensors["context"]
    own = proven(diffusers_class(model, config, FLUX2), call_of(x, {"context": context}), Degrees(tensor=2), "Flux 2")
    built = build(own).to_empty(device="cpu")
    built.load_state_dict(model.state_dict())
    text = torch.nn.functional.pad(torch.arange(7)[:, None], (3, 0))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(6.0), torch.zeros(1))
    with torch.no_grad():
        expected = model(pack(x, 2), context, torch.ones(2), places, text, return_dict=False)[0]
        found = built(x, torch.ones(2), context=context)
    assert torch.equal(pack(found, 2), expected)
