"""Families with reference pictures, by diffusers' forward with their tokens appended."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES, REFERENCES_AT_ZERO
from parallel_backend.families.parts.references import AT_ZERO, UXO, reference_tensors
from testing.cases import flux, krea2, qwen_image

SIZES, VIDEO_SIZES = ((6, 8), (9, 5)), ((1, 8, 8), (1, 12, 4))


def _with_references(case, name, method, step, size=SIZES, centred=False, shift=(0, 0, 0), extras=None, **others):
    """The case, its conditioning with reference pictures, and `extras` in ComfyUI's. `others`: further fields of Case."""
    channels, patching = case.latent[0], case.row.patching

    def tensors(generator, batch):
        pictures = [torch.randn(batch, channels, *sides, generator=generator) for sides in size]
        grid = patching.grid((batch, *case.latent))
        latents = {"ref_latents": pictures, "grid": grid}
        return case.tensors(generator, batch) | reference_tensors(
            patching, latents, method, step, centred, methods=(method,), usual=shift
        )

    def reference(model, x, timestep, conditioning_tensors):
        plain = dict(conditioning_tensors)
        tokens, positions = plain.pop(REFERENCES), plain.pop(REFERENCE_POSITIONS)[0]
        at_zero = plain.pop(REFERENCES_AT_ZERO, None)
        count = torch.Size(patching.grid(tuple(x.shape))).numel()

        def forward(hidden_states, **others):
            hidden_states = torch.cat((hidden_states, tokens), dim=1)
            if "img_shapes" in others:  # Qwen-Image's class counts positions itself
                shapes = [patching.grid(sides) for sides in size]
                more = [(1, *shape[-2:]) for shape in shapes]
                others["img_shapes"] = [[*entry, *more] for entry in others["img_shapes"]]
                if model.config["use_layer3d_rope"]:
                    picture_shapes = [(1, *sides) for frames, *sides in others["img_shapes"][0][:1] for _ in range(frames)]
                    others["img_shapes"] = [picture_shapes + more] * len(x)
                    others["additional_t_cond"] = torch.zeros(len(x), dtype=torch.long)
                return (model(hidden_states=hidden_states, **others)[0][:, :count],)
            if "position_ids" in others:  # Krea 2's, of the text too
                others["position_ids"] = torch.cat((others["position_ids"], positions))
                with _modulated_at_zero(model, at_zero, others["position_ids"], tokens.shape[1]):
                    return (model(hidden_states=hidden_states, **others)[0][:, :count],)
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


@contextmanager
def _modulated_at_zero(model, at_zero, position_ids, references):
    """Krea 2's class with the last `references` tokens modulated for time 0, if `at_zero` says so."""
    at_zero = torch.arange(len(position_ids)) >= len(position_ids) - references if at_zero is not None else None

    def each(module, inputs, out):
        zero = model.time_embed(torch.zeros(len(out)), torch.float32)
        zero = torch.nn.functional.linear(torch.nn.functional.gelu(zero, approximate="tanh"), module.weight, module.bias)
        return torch.where(at_zero[None, :, None], zero, out)

    handles = [] if at_zero is None else [model.time_mod_proj.register_forward_hook(each)]
    yield
    for handle in handles:
        handle.remove()


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
    _with_references(qwen_image.CASES[0], "qwen-image-edit", "index", 1.0, VIDEO_SIZES, centred=True),
    _with_references(
        qwen_image.CASES[0],
        "qwen-image-edit-2511",
        AT_ZERO,
        1.0,
        VIDEO_SIZES,
        centred=True,
        config={"zero_cond_t": True},
        marks=(qwen_image.EDIT_2511,),
    ),
    _with_references(
        qwen_image.CASES[0],
        "qwen-image-layered",
        "negative_index",
        1.0,
        ((1, 16, 12),),
        centred=True,
        config={"use_additional_t_cond": True, "use_layer3d_rope": True},
        latent=(16, 3, 16, 12),
        odd=None,
        full=True,
    ),
    _with_references(
        krea2.CASES[0],
        "krea2-style-reference",
        AT_ZERO,
        1.0,
        VIDEO_SIZES,
        extras={"reference_latents_method": AT_ZERO},
        full=True,
    ),
)
