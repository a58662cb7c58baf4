"""HunyuanVideo 1.5 and HunyuanImage 2.1: text alone, and with quoted words and CLIP's view of a picture."""

import diffusers
import torch

from parallel_backend.families.parts.hunyuan import NEXT_TIME
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
SHARPER = VIDEO | {"in_channels": 14, "use_meanflow": True}
NATIVE_SHARPER = NATIVE_VIDEO | {"in_channels": 98, "use_meanflow": True}
IMAGE = WIDTHS | {
    "guidance_embeds": False,
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
DISTILLED, NATIVE_DISTILLED = (config | {"use_meanflow": True, "guidance_embeds": True} for config in (IMAGE, NATIVE_IMAGE))
# The latent and the picture that is to be made sharper; no quoted words.
REFINER = IMAGE | {"in_channels": 8, "out_channels": 4, "patch_size": (1, 1, 1), "rope_axes_dim": (4, 6, 6)}
REFINER |= {"text_embed_2_dim": None}
NATIVE_REFINER = NATIVE_IMAGE | {"in_channels": 128, "patch_size": (1, 1, 1), "rope_axes_dim": (16, 56, 56)}
NATIVE_REFINER |= {"text_embed_2_dim": None}


def _tensors(config, picture):
    def make(generator, batch):
        tensors = {"context": torch.randn(batch, 7, config["text_embed_dim"], generator=generator)}
        if config["text_embed_2_dim"] is not None:
            tensors["glyphs"] = torch.randn(batch, 3, config["text_embed_2_dim"], generator=generator)
        if picture:
            tensors["picture"] = torch.randn(batch, 2, config["image_embed_dim"], generator=generator)
        if config.get("use_meanflow"):
            tensors[NEXT_TIME] = torch.full((batch,), 350.0)
        if config.get("guidance_embeds"):
            tensors["guidance"] = torch.full((batch,), 4.5)
        return tensors

    return make


def _ones(tensor):
    return torch.ones(tensor.shape[:2], dtype=torch.bool)


def _reference(model, x, timestep, tensors):
    """diffusers' forward, as its pipelines call it."""
    kind = getattr(diffusers, type(model).__name__)
    original = kind(**dict(model.config)).eval()
    original.load_state_dict(model.state_dict())
    more = {"image_embeds": tensors["picture"]} if "picture" in tensors else {}
    if "glyphs" in tensors:
        more["encoder_hidden_states_2"] = tensors["glyphs"]
        more["encoder_attention_mask_2"] = _ones(tensors["glyphs"])
    if NEXT_TIME in tensors:
        more["timestep_r"] = tensors[NEXT_TIME]
    if "guidance" in tensors:
        more["guidance"] = tensors["guidance"] * 1000
    return original(
        hidden_states=x,
        timestep=timestep.float(),
        encoder_hidden_states=tensors["context"],
        encoder_attention_mask=_ones(tensors["context"]),
        **more,
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
        extras = {"pooled_output": torch.randn(1, 8, generator=generator)}
        if config["text_embed_2_dim"] is not None:
            extras["conditioning_byt5small"] = torch.randn(1, 5, config["text_embed_2_dim"], generator=generator)
        if config.get("patch_size") == (1, 1, 1):
            extras["concat_latent_image"] = torch.randn(1, 32, 1, 8, 6, generator=generator)
        if picture:
            extras["clip_vision_output.last_hidden_state"] = torch.randn(
                1, 4, config["image_embed_dim"], generator=generator
            )
            sharper = config.get("use_meanflow")
            extras["concat_latent_image"] = torch.randn(1, 66 if sharper else 32, 3, 8, 6, generator=generator)
            if not sharper:
                extras["concat_mask"] = torch.rand(1, 1, 3, 8, 6, generator=generator)
        if config.get("guidance_embeds"):
            extras["guidance"] = 4.5
        return torch.randn(1, 9, config["text_embed_dim"], generator=generator), extras

    return make


def _case(name, family, config, latent, odd, native, native_latent, **others):
    picture = "image_embed_dim" in config
    return Case(
        name=name,
        family=family,
        config=config,
        latent=latent,
        odd=odd,
        tensors=_tensors(config, picture),
        reference=_reference,
        timestep=700.0,
        adjust=_adjust,
        native=Native(native, _conditioning(native, picture), native_latent),
        **others,
    )


CASES = (
    _case(
        "hunyuan-video-1.5",
        "hunyuan-video-1.5",
        VIDEO,
        (9, 3, 6, 5),
        (9, 2, 5, 3),
        NATIVE_VIDEO,
        (32, 3, 8, 6),
        sampled=False,
    ),
    _case(
        "hunyuan-video-1.5-sr",
        "hunyuan-video-1.5",
        SHARPER,
        (14, 3, 6, 5),
        None,
        NATIVE_SHARPER,
        (32, 3, 8, 6),
        sampled=False,
        full=True,
    ),
    _case("hunyuan-image-2.1", "hunyuan-image-2.1", IMAGE, (6, 8, 6), (6, 7, 5), NATIVE_IMAGE, (64, 8, 6)),
    _case(
        "hunyuan-image-2.1-distilled",
        "hunyuan-image-2.1",
        DISTILLED,
        (6, 8, 6),
        None,
        NATIVE_DISTILLED,
        (64, 8, 6),
        full=True,
    ),
    _case(
        "hunyuan-image-2.1-refiner",
        "hunyuan-image-2.1-refiner",
        REFINER,
        (8, 2, 8, 6),
        (8, 2, 7, 5),
        NATIVE_REFINER,
        (32, 1, 8, 6),
        sampled=False,
    ),
)
