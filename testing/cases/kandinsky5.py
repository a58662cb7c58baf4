"""Kandinsky 5: video, with and without a first picture, and image."""

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_kandinsky

from testing.cases.case import Case, Native

VIDEO = {
    "in_visual_dim": 3,
    "out_visual_dim": 3,
    "visual_cond": True,
    "in_text_dim": 24,
    "in_text_dim2": 12,
    "time_dim": 16,
    "model_dim": 48,
    "ff_dim": 80,
    "num_text_blocks": 2,
    "num_visual_blocks": 3,
    "axes_dims": (4, 6, 6),
    "patch_size": (1, 2, 2),
}
IMAGE = VIDEO | {"visual_cond": False}
# What ComfyUI takes for granted: 16 channels, text of 3584 and 768, heads of 64 where the width is none that it knows.
_SIZES = {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768, "model_dim": 128}
NATIVE_VIDEO = VIDEO | _SIZES | {"axes_dims": (16, 24, 24), "num_visual_blocks": 2}
NATIVE_IMAGE = NATIVE_VIDEO | {"visual_cond": False}
START = 1
"""Frames of the first picture."""


def _tensors(start):
    def make(generator, batch):
        tensors = {
            "context": torch.randn(batch, 5, VIDEO["in_text_dim"], generator=generator),
            "pooled": torch.randn(batch, VIDEO["in_text_dim2"], generator=generator),
        }
        if start is not None:
            tensors["start"] = torch.randn(batch, 3, START, *start, generator=generator)
        return tensors

    return make


class _Exact(transformer_kandinsky.Kandinsky5AttnProcessor):
    """diffusers' attention processor, without the rounding of rotated queries and keys to bf16."""

    def __call__(self, *arguments, **named):
        kept, torch.bfloat16 = torch.bfloat16, torch.float32
        try:
            return super().__call__(*arguments, **named)
        finally:
            torch.bfloat16 = kept


def _reference(model, x, timestep, tensors):
    """diffusers' forward, as its pipelines call it, in float32."""
    original = diffusers.Kandinsky5Transformer3DModel(**dict(model.config)).eval()
    original.load_state_dict(model.state_dict())
    for module in original.modules():
        if isinstance(module, transformer_kandinsky.Kandinsky5Attention):
            module.processor = _Exact()
    height, width = x.shape[-2:]
    if "start" in tensors:
        x = x.clone()
        x[:, :3, :START] = tensors["start"]
    video = x if x.ndim == 5 else x.unsqueeze(2)
    video = F.pad(video, (0, width % 2, 0, height % 2, 0, 0), mode="circular").movedim(1, -1)
    out = original(
        hidden_states=video,
        encoder_hidden_states=tensors["context"],
        timestep=timestep.float(),
        pooled_projections=tensors["pooled"],
        visual_rope_pos=[torch.arange(size) for size in (video.shape[1], video.shape[2] // 2, video.shape[3] // 2)],
        text_rope_pos=torch.arange(tensors["context"].shape[1]),
        scale_factor=(1.0, 2.0, 2.0) if x.ndim == 5 else (1.0, 1.0, 1.0),
        return_dict=True,
    ).sample.movedim(-1, 1)[..., :height, :width]
    return out if x.ndim == 5 else out.squeeze(2)


def _adjust(model):
    """Norms that scale by about one, and an output that leaves the latent in sight at sigmas of 1000."""
    for name, parameter in model.named_parameters():
        if name.endswith(".norm.weight"):
            parameter.data += 1
    if model.config.in_visual_dim < 16:
        model.out_layer.out_layer.weight.data *= 0.02
        model.out_layer.out_layer.bias.data *= 0.02


def _conditioning(start):
    def make(generator):
        extras = {"pooled_output": torch.randn(1, 768, generator=generator)}
        if start:
            extras["time_dim_replace"] = torch.randn(1, 16, 1, 8, 6, generator=generator)
        return torch.randn(1, 9, 3584, generator=generator), extras

    return make


def _case(name, config, latent, odd, start=False, **others):
    return Case(
        name=name,
        family="kandinsky-5-video" if config["visual_cond"] else "kandinsky-5-image",
        config=config,
        latent=latent,
        odd=odd,
        tensors=_tensors(latent[-2:] if start else None),
        reference=_reference,
        timestep=700.0,
        adjust=_adjust,
        sampled=not config["visual_cond"],
        **others,
    )


CASES = (
    _case("kandinsky-5-t2v", VIDEO, (7, 2, 10, 6), (7, 2, 9, 5), full=True),
    _case(
        "kandinsky-5-video",
        VIDEO,
        (7, 3, 10, 6),
        None,
        start=True,
        native=Native(NATIVE_VIDEO, _conditioning(True), (16, 3, 8, 6)),
    ),
    _case(
        "kandinsky-5-image",
        IMAGE,
        (3, 12, 10),
        (3, 11, 9),
        native=Native(
            NATIVE_IMAGE,
            _conditioning(False),
            (16, 12, 10),
            detected={"rope_scale_factor": (1.0, 1.0, 1.0), "classes": {"Kandinsky5Image": {"model_dim": 128}}},
        ),
    ),
)
