"""Wan VACE: a control video whose blocks are behind every second of Wan's."""

from dataclasses import dataclass

import diffusers
import torch

from parallel_backend.families import FAMILIES
from testing.cases.case import Case, Native
from testing.cases.wan import WAN

VACE = WAN | {"num_layers": 4, "vace_layers": (0, 2), "vace_in_channels": 96}


def of_diffusers(model):
    """diffusers' class with the weights of the family's."""
    source = FAMILIES["wan-vace"].file.folder.source
    theirs = diffusers.WanVACETransformer3DModel(**VACE).eval()
    theirs.load_state_dict({source(VACE, key).key: value for key, value in model.state_dict().items()})
    return theirs


def _tensors(generator, batch):
    return {
        "context": torch.randn(batch, 7, VACE["text_dim"], generator=generator),
        "strength": torch.full((batch,), 0.7),
    }


def _reference(model, x, timestep, tensors):
    """As WanVACEPipeline calls it."""
    return of_diffusers(model)(
        hidden_states=x,
        timestep=timestep,
        encoder_hidden_states=tensors["context"],
        control_hidden_states=tensors["control"],
        control_hidden_states_scale=tensors["strength"][:1].repeat(2),
        return_dict=False,
    )[0]


def _conditioning(generator):
    extras = {
        "vace_frames": [torch.randn(1, 32, 3, 8, 6, generator=generator)],
        "vace_mask": [torch.rand(1, 64, 3, 8, 6, generator=generator)],
        "vace_strength": [0.7],
    }
    return torch.randn(1, 9, VACE["text_dim"], generator=generator), extras


@dataclass(frozen=True)
class Controlled(Case):
    """The control is as large as the latent, whose size a test may change."""

    def inputs(self, batch=2, latent=None, seed=1):
        x, timestep, tensors = super().inputs(batch, latent, seed)
        control = torch.randn(batch, 96, *x.shape[2:], generator=torch.Generator().manual_seed(seed))
        return x, timestep, tensors | {"control": control}

    def save_folder(self, model, path):
        of_diffusers(model).save_pretrained(path)


CASES = (
    Controlled(
        name="wan-vace",
        family="wan-vace",
        config=VACE,
        latent=(16, 4, 12, 10),
        odd=None,
        tensors=_tensors,
        reference=_reference,
        timestep=700.0,
        native=Native(VACE, _conditioning, (16, 3, 8, 6), detected={"text_dim": VACE["text_dim"]}),
    ),
)
