"""Wan with camera control, without CLIP's picture as in 2.2. Rays are of pixels, eight to a latent's."""

from dataclasses import dataclass

import torch

from testing.cases.case import Case, Native
from testing.cases.wan import I2V, WAN

CAMERA = WAN | I2V | {"control_channels": 24}


def _tensors(generator, batch):
    return {"context": torch.randn(batch, 7, CAMERA["text_dim"], generator=generator)}


def _reference(model, x, timestep, tensors):
    """The family's class in one piece, since diffusers has none. tests/comfyui compares the class with ComfyUI's."""
    return model(x, timestep, tensors["context"], patch_inputs={"camera": tensors["camera"]})[0]


def _conditioning(generator):
    extras = {
        "concat_latent_image": torch.randn(1, 16, 3, 8, 6, generator=generator),
        "concat_mask": torch.rand(1, 1, 3, 8, 6, generator=generator),
        "camera_conditions": torch.randn(1, 24, 3, 64, 48, generator=generator),
    }
    return torch.randn(1, 9, CAMERA["text_dim"], generator=generator), extras


@dataclass(frozen=True)
class Guided(Case):
    """The rays are as many as the latent, whose size a test may change, has pixels."""

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        frames, height, width = x.shape[2:]
        camera = torch.randn(batch, 24, frames, 8 * height, 8 * width, generator=torch.Generator().manual_seed(seed))
        return x, timestep, tensors | {"camera": camera}


CASES = (
    Guided(
        name="wan-2.2-camera",
        family="wan-camera",
        config=CAMERA,
        latent=(36, 4, 12, 10),
        odd=None,
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        sampled=False,
        native=Native(CAMERA, _conditioning, (16, 3, 8, 6), detected={"text_dim": CAMERA["text_dim"]}),
    ),
)
