"""SCAIL and SCAIL-2: two pictures and a pose video of half the size are reference tokens. SCAIL-2 has masks too."""

from dataclasses import dataclass

import torch

from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES
from parallel_backend.families.parts.wan import PROMPT
from testing.cases.case import Case, Native
from testing.cases.wan import CLIP, WAN

SCAIL = WAN | CLIP | {"in_channels": 20, "mask_channels": None}
SCAIL_2 = SCAIL | {"mask_channels": 28}


def _tensors(generator, batch):
    def random(*shape):
        return torch.randn(batch, *shape, generator=generator)

    return {"context": random(PROMPT, SCAIL["text_dim"]), "picture": random(5, SCAIL["image_dim"])}


def _reference(model, x, timestep, tensors):
    """The family's class in one piece, since diffusers has none. tests/comfyui compares the class with ComfyUI's."""
    positions = tensors[REFERENCE_POSITIONS]
    places, kinds, sizes = positions.split((3, 2, 2), dim=-1)
    posed, (rows, columns) = kinds[..., 0], sizes.unbind(-1)
    down, right = x.shape[-2] / 2 / rows, x.shape[-1] / 2 / columns
    frame, row, column = places.unbind(-1)
    row = row + posed * (row * (down - 1) + (down - 1) / 2)
    column = column + posed * (column * (right - 1) + (right - 1) / 2 + 120)
    return model(
        x,
        timestep,
        tensors["context"],
        tensors["picture"],
        positions=torch.stack((frame, row, column, torch.zeros_like(row)), dim=-1),
        patch_inputs={"mask": tensors.get("mask"), "references": tensors[REFERENCES], "kinds": kinds},
    )[0]


def _conditioning(masks, replaces):
    def make(generator):
        def random(*shape):
            return torch.randn(1, *shape, generator=generator)

        extras = {
            "clip_vision_output.penultimate_hidden_states": random(5, 1280),
            "reference_latents": [random(16, 1, 8, 6), random(16, 1, 8, 6)],
            "pose_video_latent": random(16, 3, 4, 4),
        }
        if masks:
            extras["driving_mask_28ch"] = random(3, 28, 4, 4)
            extras["ref_mask_28ch"] = random(5, 28, 8, 6)
            extras["ref_mask_flag"] = not replaces
        return random(PROMPT, SCAIL["text_dim"]), extras

    return make


@dataclass(frozen=True)
class Posed(Case):
    """Pictures are as large as the latent, whose size a test may change."""

    replaces: bool = False

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        generator = torch.Generator().manual_seed(seed)

        def random(channels, frames, *sizes):
            return torch.randn(batch, channels, frames, *sizes, generator=generator)

        entry = {
            "context": tensors["context"],
            "clip_fea": tensors["picture"],
            "reference_latent": random(20, 2, *x.shape[3:]),
            "pose_latents": random(20, x.shape[2], 6, 4),
        }
        if self.config["mask_channels"]:
            entry["ref_mask_latents"] = random(28, 2 + x.shape[2], *x.shape[3:])
            entry["sam_latents"] = random(28, x.shape[2], 6, 4)
            entry["ref_mask_flag"] = not self.replaces
        return x, timestep, FAMILIES["wan-scail"].inputs.conditioning(self.config, entry)


def _case(name, config, **others):
    return Posed(
        name=name,
        family="wan-scail",
        config=config,
        latent=(20, 4, 12, 10),
        odd=None,
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        sampled=False,
        native=Native(
            config,
            _conditioning(config["mask_channels"], others.get("replaces")),
            (16, 3, 8, 6),
            detected={"text_dim": SCAIL["text_dim"]},
        ),
        **others,
    )


CASES = (
    _case("scail-2", SCAIL_2),
    _case("scail-2-replaces", SCAIL_2, replaces=True, full=True),
    _case("scail", SCAIL, full=True),
)
