"""HunyuanVideo 1.5 and HunyuanImage 2.1: text alone, and with quoted words and CLIP's view of a picture."""

import diffusers
import torch

from testing.cases.case import Case, Native

WIDTHS = {"text_embed_dim": 24, "text_embed_2_dim": 20}
VIDEO = WIDTHS | {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 3,  # two ranks have two of them and one
    "attention_head_dim": 16,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "image_embed_dim": 28,
    "rope_axes_dim": (4, 6, 6),
}
# What ComfyUI takes for granted: heads of 128, 32 channels, ByT5 of 1472 and SigLIP of 1152.
NATIVE_VIDEO = VIDEO | {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "num_layers": 2,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_axes_dim": (16, 56, 56),
}
IMAGE = WIDTHS | {
    "in_channels": 6,
    "out_channels": 6,
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "num_refiner_layers": 2,
    "rope_axes_dim": (8, 8),
}
NATIVE_IMAGE = IMAGE | {
    "in_channels": 64,
    "out_channels": 64,
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "num_single_layers": 2,
    "text_embed_2_dim": 1472,
    "rope_axes_dim": (64, 64),
}


def _tensors(config, picture):
    def make(generator, batch):
        tensors = {"context": torch.randn(batch, 7, config["text_embed_dim"], generator=generator)}
        tensors["glyphs"] = torch.randn(batch, 3, config["text_embed_2_dim"], generator=generator)
        if picture:
            tensors["picture"] = torch.randn(batch, 2, config["image_embed_dim"], generator=generator)
        return tensors

    return make


def _ones(tensor):
    return torch.ones(tensor.shape[:2], dtype=torch.bool)


def _reference(model, x, timestep, tensors):
    """diffusers' forward, as its pipelines call it."""
    kind = getattr(diffusers, type(model).__name__)
    original = kind(**dict(model.config)).eval()
    original.load_state_dict(model.state_dict())
    picture = {"image_embeds": tensors["picture"]} if "picture" in tensors else {}
    return original(
        hidden_states=x,
        timestep=timestep.float(),
        encoder_hidden_states=tensors["context"],
        encoder_attention_mask=_ones(tensors["context"]),
        encoder_hidden_states_2=tensors["glyphs"],
        encoder_attention_mask_2=_ones(tensors["glyphs"]),
        **picture,
        return_dict=False,
    )[0]


def _adjust(model):
    """Norms that scale by about one, as trained ones do, and an output that leaves the latent in sight at sigmas of 1000."""
    if model.config.in_channels < 16:
        model.proj_out.weight.data *= 0.02
        model.proj_out.bias.data *= 0.02
    for name, parameter in model.named_parameters():
        if name.endswith(("norm1.weight", "norm2.weight", "norm.weight", "norm_in.weight", "norm_out.weight")):
            parameter.data += 1


def _conditioning(config, picture):
    def make(generator):
        extras = {
            "pooled_output": torch.randn(1, 8, generator=generator),
            "conditioning_byt5small": torch.randn(1, 5, config["text_embed_2_dim"], generator=generator),
        }
        if picture:
            extras["clip_vision_output.last_hidden_state"] = torch.randn(
                1, 4, config["image_embed_dim"], generator=generator
            )
            extras["concat_latent_image"] = torch.randn(1, 32, 3, 8, 6, generator=generator)
            extras["concat_mask"] = torch.rand(1, 1, 3, 8, 6, generator=generator)
        return torch.randn(1, 9, config["text_embed_dim"], generator=generator), extras

    return make


CASES = (
    Case(
        name="hunyuan-video-1.5",
        family="hunyuan-video-1.5",
        config=VIDEO,
        latent=(9, 3, 6, 5),
        odd=(9, 2, 5, 3),
        tensors=_tensors(VIDEO, True),
        reference=_reference,
        timestep=700.0,
        adjust=_adjust,
        sampled=False,
        native=Native(NATIVE_VIDEO, _conditioning(NATIVE_VIDEO, True), (32, 3, 8, 6)),
    ),
    Case(
        name="hunyuan-image-2.1",
        family="hunyuan-image-2.1",
        config=IMAGE,
        latent=(6, 8, 6),
        odd=(6, 7, 5),
        tensors=_tensors(IMAGE, False),
        reference=_reference,
        timestep=700.0,
        adjust=_adjust,
        native=Native(NATIVE_IMAGE, _conditioning(NATIVE_IMAGE, False), (64, 8, 6)),
    ),
)
