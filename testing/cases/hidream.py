"""HiDream-I1, and E1 with the picture that it changes."""

import diffusers
import torch

from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import REFERENCES
from parallel_backend.families.hidream import EXPERTS, reference_picture
from testing.cases.case import Case, Native

CONFIG = {
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 128,
    "num_attention_heads": 3,  # two ranks have two of them and one
    "caption_channels": (20, 20),
    "text_emb_dim": 12,
    "num_routed_experts": EXPERTS,
    "num_activated_experts": 2,
    "axes_dims_rope": (64, 32, 32),
    "max_resolution": (128, 128),
    "llama_layers": (0, 1, 2, 3, 4),
}
SMALL = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2, "llama_layers": (0, 1, 2)}
NATIVE = CONFIG | SMALL | {"in_channels": 16, "out_channels": 16}
T5, LLAMA = 3, 4
"""Tokens of both."""
EDIT_LATENT = (3, 12, 6)
"""E1's latent with the picture at its right."""


def _tensors(generator, batch):
    llama = torch.randn(batch, 5, LLAMA, 20, generator=generator)
    t5 = torch.randn(batch, T5, 20, generator=generator)
    return {
        "context": torch.cat((t5, llama[:, -1], llama[:, -1]), dim=1),
        "pooled": torch.randn(batch, CONFIG["text_emb_dim"], generator=generator),
        "llama": llama,
    }


def _edit_tensors(generator, batch):
    picture = torch.randn(batch, *EDIT_LATENT, generator=generator)
    return _tensors(generator, batch) | reference_picture(picture, EDIT_LATENT[-1])


def _reference(model, x, timestep, tensors):
    """diffusers' forward, as HiDreamImagePipeline calls it. A picture is appended to the latent along its width."""
    original = diffusers.HiDreamImageTransformer2DModel(**dict(model.config)).eval()
    original.load_state_dict(model.state_dict())
    width = x.shape[-1]
    if REFERENCES in tensors:
        x = torch.cat((x, Patching().unpack(tensors[REFERENCES], x.shape)), dim=-1)
    return -original(
        hidden_states=x,
        timesteps=timestep.float(),
        encoder_hidden_states_t5=tensors["context"][:, :T5],
        encoder_hidden_states_llama3=tensors["llama"].movedim(1, 0),
        pooled_embeds=tensors["pooled"],
        return_dict=False,
    )[0][..., :width]


def _adjust(model):
    """Norms that scale by about one, and an output that leaves the latent in sight at sigmas of 1000."""
    for name, parameter in model.named_parameters():
        if "rms_norm" in name:
            parameter.data += 1
    if model.config.in_channels < 16:
        model.final_layer.linear.weight.data *= 0.02
        model.final_layer.linear.bias.data *= 0.02


def _conditioning(edit):
    def make(generator):
        extras = {
            "pooled_output": torch.randn(1, 12, generator=generator),
            "conditioning_llama3": torch.randn(1, 3, 6, 20, generator=generator),
        }
        if edit:
            extras["concat_latent_image"] = torch.randn(1, 16, 11, 8, generator=generator)
        return torch.randn(1, 9, 20, generator=generator), extras

    return make


def _case(name, latent, tensors, edit, **others):
    return Case(
        name=name,
        family="hidream-i1",
        config=CONFIG,
        latent=latent,  # diffusers pads what is not square
        odd=None,
        tensors=tensors,
        reference=_reference,
        timestep=700.0,
        adjust=_adjust,
        native=Native(
            NATIVE,
            _conditioning(edit),
            (16, 11, 8),
            detected={**SMALL, "caption_channels": [20, 20], "text_emb_dim": 12},
        ),
        **others,
    )


CASES = (
    _case("hidream-i1", (3, 12, 12), _tensors, False),
    _case("hidream-e1", EDIT_LATENT, _edit_tensors, True, full=True),
)
