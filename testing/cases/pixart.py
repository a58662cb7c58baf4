"""PixArt-alpha, which knows the picture's size, and Sigma, which does not."""

import torch
import torch.nn.functional as F

from testing.cases.case import Case, Native

CONFIG = {
    "num_attention_heads": 3,  # two ranks have two of them and one
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 4,
    "cross_attention_dim": 216,
    "attention_bias": True,
    "sample_size": 128,
    "patch_size": 2,
    "use_additional_conditions": True,
    "caption_channels": 24,
}
DETECTED = {"hidden_size": 216, "num_heads": 3, "caption_channels": 24}


def _tensors(config):
    def make(generator, batch):
        tensors = {"context": torch.randn(batch, 7, config["caption_channels"], generator=generator)}
        if config["use_additional_conditions"]:
            size = 1000 * torch.rand(batch, 2, generator=generator)
            tensors |= {"resolution": size, "aspect_ratio": size[:, :1] / size[:, 1:]}
        return tensors

    return make


def _reference(model, x, timestep, tensors):
    height, width = x.shape[-2:]
    out = model(
        hidden_states=F.pad(x, (0, width % 2, 0, height % 2), mode="circular"),
        encoder_hidden_states=tensors["context"],
        timestep=timestep,
        added_cond_kwargs={name: tensors.get(name) for name in ("resolution", "aspect_ratio")},
        return_dict=False,
    )[0]
    return out.chunk(2, dim=1)[0][..., :height, :width]


def _conditioning(size):
    return lambda generator: (torch.randn(1, 9, CONFIG["caption_channels"], generator=generator), size)


def _case(name, changes, size):
    config = CONFIG | changes
    return Case(
        name=name,
        family="pixart",
        config=config,
        latent=(4, 16, 12),
        odd=(4, 15, 11),
        tensors=_tensors(config),
        reference=_reference,
        timestep=700.0,
        # ComfyUI scales positions by a size in units of 64, of which this is one.
        # Samples reach 4,600, since the noise of these models starts at a sigma of 157.
        native=Native(config, _conditioning(size), (4, 40, 32), limit=5e-3, detected=DETECTED),
    )


CASES = (
    _case("pixart-alpha", {}, {"width": 512, "height": 768}),  # as CLIP Text Encode PixArt Alpha gives them
    _case("pixart-sigma", {"use_additional_conditions": False}, {}),
)
