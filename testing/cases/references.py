"""Families with reference pictures, by diffusers' forward with their tokens appended."""

from dataclasses import replace

import torch

from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES
from parallel_backend.families.parts.references import UXO, reference_tensors
from testing.cases import flux

SIZES = (6, 8), (9, 5)


def _with_references(case, name, method, step, size=SIZES, shift=(0, 0, 0), extras=None, **others):
    """The case, its conditioning with reference pictures, and `extras` in ComfyUI's. `others`: further fields of Case."""
    channels, patching = case.latent[0], case.row.patching

    def tensors(generator, batch):
        pictures = [torch.randn(batch, channels, *sides, generator=generator) for sides in size]
        grid = patching.grid((batch, *case.latent))
        latents = {"ref_latents": pictures, "grid": grid}
        return case.tensors(generator, batch) | reference_tensors(
            patching, latents, method, step, methods=(method,), usual=shift
        )

    def reference(model, x, timestep, conditioning_tensors):
        plain = dict(conditioning_tensors)
        tokens, positions = plain.pop(REFERENCES), plain.pop(REFERENCE_POSITIONS)[0]
        count = torch.Size(patching.grid(tuple(x.shape))).numel()

        def forward(hidden_states, **others):
            hidden_states = torch.cat((hidden_states, tokens), dim=1)
            img_ids = others.pop("img_ids")
            more = torch.nn.functional.pad(positions, (0, img_ids.shape[1] - positions.shape[1]))
            out = model(hidden_states=hidden_states, img_ids=torch.cat((img_ids, more)), **others)
            return (out[0][:, :count],)

        return case.reference(forward, x, timestep, plain)

    def conditioning(generator):
        text, entry = case.native.conditioning(generator)
        shape = (1, case.native.latent[0])
        pictures = [torch.randn(*shape, *sides, generator=generator) for sides in size]
        return text, entry | {"reference_latents": pictures} | (extras or {})

    native = replace(case.native, conditioning=conditioning, config=case.native.config | others.get("config", {}))
    others["config"] = case.config | others.get("config", {})
    return replace(case, name=name, tensors=tensors, reference=reference, native=native, convert=None, **others)


def _named(cases, name):
    return next(case for case in cases if case.name == name)


CASES = (
    _with_references(_named(flux.CASES, "flux-dev"), "flux-kontext", "offset", 1.0),
    _with_references(
        _named(flux.CASES, "flux-dev"),
        "flux-uso",
        UXO,
        1.0,
        extras={"reference_latents_method": UXO},
        odd=None,
        full=True,
    ),
)
