"""Cosmos Predict2: a first picture to video, with a time for each frame, and text to image."""

from types import SimpleNamespace
from unittest import mock

import diffusers
import torch
import torch.nn.functional as F
from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers
from diffusers.models.transformers import transformer_cosmos

from testing.cases.case import Case, Native
from testing.cases.wan import TimePerFrame

VIDEO = {
    "in_channels": 17,
    "out_channels": 16,
    "num_attention_heads": 3,
    "attention_head_dim": 24,
    "num_layers": 3,
    "mlp_ratio": 2.0,
    "text_embed_dim": 20,
    "adaln_lora_dim": 8,
    "max_size": (128, 240, 240),
    "patch_size": (1, 2, 2),
    "rope_scale": (1.0, 1.0, 1.0),
    "concat_padding_mask": True,
    "extra_pos_embed_type": None,
}
IMAGE = VIDEO | {"in_channels": 16, "rope_scale": (1.0, 4.0, 4.0)}
VISION = SimpleNamespace(
    functional=SimpleNamespace(resize=lambda mask, size, interpolation: mask),
    InterpolationMode=SimpleNamespace(NEAREST=None),
)
"""torchvision's transforms, which are not among what the pack needs."""
DETECTED = {"num_heads": 3, "mlp_ratio": 2.0, "crossattn_emb_channels": 20, "adaln_lora_dim": 8}


def _reference(model, x, timestep, tensors):
    """diffusers' forward, as Cosmos2VideoToWorldPipeline calls it, with a mask that fits already."""
    height, width = x.shape[-2:]
    x = F.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
    with mock.patch.object(transformer_cosmos, "transforms", VISION, create=True):
        out = diffusers.CosmosTransformer3DModel.forward(
            model,
            hidden_states=x,
            timestep=timestep if timestep.ndim == 1 else timestep[:, None, :, None, None],
            encoder_hidden_states=tensors["context"],
            padding_mask=x.new_zeros(1, 1, *x.shape[-2:]),
            return_dict=False,
        )[0]
    return out[..., :height, :width]


def _adjust(model):
    """Norms that scale by about one, as trained ones do, and modulation that multiplies bf16's rounding less."""
    for name, parameter in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight", "time_embed.norm.weight")):
            parameter.data += 1
        if name.endswith("linear_2.weight"):
            parameter.data /= 2


def _conditioning(masked):
    def make(generator):
        mask = torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1, 1).expand(1, 16, 3, 8, 6)
        return torch.randn(1, 9, 20, generator=generator), {"denoise_mask": mask} if masked else {}

    return make


def _case(name, config, kind, latent, **others):
    return kind(
        name=name,
        family="cosmos-predict2",
        config=config,
        latent=(config["in_channels"], *latent),
        odd=(config["in_channels"], latent[0], latent[1] - 1, latent[2] - 1),
        tensors=lambda generator, batch: {"context": torch.randn(batch, 5, config["text_embed_dim"], generator=generator)},
        reference=_reference,
        adjust=_adjust,
        convert=lambda state: convert_cosmos_transformer_checkpoint_to_diffusers({f"net.{k}": v for k, v in state.items()}),
        sampled=config["in_channels"] == config["out_channels"],
        native=Native(
            config,
            _conditioning(kind is TimePerFrame),
            (16, 3 if latent[0] > 1 else 1, 8, 6),
            limit=1e-4,  # sigmas begin at 80, and latents with them
            detected=DETECTED,
        ),
        **others,
    )


CASES = (
    _case("cosmos-predict2-image", IMAGE, Case, (1, 12, 10), full=True),
    _case("cosmos-predict2-video", VIDEO, TimePerFrame, (3, 10, 8)),
)
