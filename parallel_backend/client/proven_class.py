"""A class of core.own_class.PACKAGES for callers without ComfyUI: proofs by a trial of their call, and their calls."""

import dataclasses
from collections.abc import Mapping

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.trials.trial import trial

from .sampling import Prompt

TIMES = 1.0, 0.5, 0.01
"""The first, a middle, and nearly the last timestep of a run."""


def proven(own: OwnClass, call: Call, degrees: Degrees, name: str) -> OwnClass:
    """Return the class with the proofs of a trial for calls like this one. `name`: the model's name, for the message.

    Raises ValueError if bands are not proven, batch entries depend on each other or latents are not padded circularly; and,
    naming the widget, for degrees that are not proven."""
    proof = trial(own, call, TIMES, bands=True, tensor=degrees.tensor)
    proof.check(degrees, name)
    if why := proof.batch or proof.bands:
        raise ValueError(f"model: {name} cannot run on ranks: {why}.")
    if proof.latent is None or not proof.latent.pads:
        raise ValueError(f"model: {name} does not pad its latent circularly.")
    return dataclasses.replace(own, blocks=proof.blocks, latent=proof.latent)


def call_of(x: torch.Tensor, arguments: Mapping[str, torch.Tensor]) -> Call:
    """Return the call at timestep 1 with the latent [B, C, ...] and these arguments of the class, by name."""
    return Call(x, torch.ones(len(x)), arguments)


def tensors_of(arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the conditioning tensors of these arguments, by name. They suit any latent size: the client pads the latent
    circularly to whole tokens, which `proven` has checked."""
    return to_tensors(arguments, torch.ones(len(next(iter(arguments.values())))))


def prompt_for_class(prompt: Prompt) -> Prompt:
    """Return a prompt whose tensors are the class's arguments, as conditioning tensors."""
    return dataclasses.replace(prompt, positive=tensors_of(prompt.positive), negative=tensors_of(prompt.negative))
