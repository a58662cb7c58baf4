"""Families with reference pictures, by diffusers' own forward with their tokens appended."""

from dataclasses import replace

import torch

from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES
from parallel_backend.families.parts.references import reference_tensors
from tests.families.cases import flux, flux2, qwen_image

SIZES = ((6, 8), (9, 5))


def _with_references(case, name, method, step, size=SIZES, centred=False):
    """The case, its conditioning with two reference pictures."""
    channels, patching = case.latent[0], case.row.patching

    def tensors(generator, batch):
        pictures = [torch.randn(batch, channels, *sides, generator=generator) for sides in size]
        given = {"ref_latents": pictures}
        return case.tensors(generator, batch) | reference_tensors(patching, given, method, step, centred)

    def reference(model, x, timestep, given):
        plain = dict(given)
        tokens, positions = plain.pop(REFERENCES), plain.pop(REFERENCE_POSITIONS)[0]
        count = torch.Size(patching.grid(tuple(x.shape))).numel()

        def forward(hidden_states, **others):
            hidden_states = torch.cat((hidden_states, tokens), dim=1)
            if "img_shapes" in others:  # Qwen-Image's class counts positions itself
                shapes = [patching.grid(sides) for sides in size]
                others["img_shapes"] = [[*entry, *((1, *shape[-2:]) for shape in shapes)] for entry in others["img_shapes"]]
                return (model(hidden_states=hidden_states, **others)[0][:, :count],)
            img_ids = others.pop("img_ids")
            more = torch.nn.functional.pad(positions, (0, img_ids.shape[1] - positions.shape[1]))
            out = model(hidden_states=hidden_states, img_ids=torch.cat((img_ids, more)), **others)
            return (out[0][:, :count],)

        return case.reference(forward, x, timestep, plain)

    def conditioning(generator):
        text, extras = case.native.conditioning(generator)
        shape = (1, case.native.latent[0])
        pictures = [torch.randn(*shape, *sides, generator=generator) for sides in size]
        return text, extras | {"reference_latents": pictures}

    native = replace(case.native, conditioning=conditioning)
    return replace(case, name=name, tensors=tensors, reference=reference, native=native, convert=None)


def _named(cases, name):
    return next(case for case in cases if case.name == name)


CASES = (
    _with_references(_named(flux.CASES, "flux-dev"), "flux-kontext", "offset", 1.0),
    _with_references(flux2.CASES[0], "flux2-references", "index", 10.0),
    _with_references(qwen_image.CASES[0], "qwen-image-edit", "index", 1.0, ((1, 8, 8), (1, 12, 4)), centred=True),
)
