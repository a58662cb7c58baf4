"""MiniMax H3 on a rank: time, kind and position of each of the rank's tokens, and the class's arguments."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from parallel_backend.core.device_copies import to_device

from ..base.step_inputs import REFERENCE_POSITIONS, Config, StepInputs
from .minimax_conditioning import KINDS, shifted, sigma_of
from .minimax_layout import CHANNELS, frame_sides, sound_places, video_places

VIDEO, TEXT, SOUND = 0, 1, 2
"""Kinds of tokens, each with its modulation."""
NOISY_SOUND, CLEAN_VIDEO = 1, 2
"""Indices in `levels`. The noisy video's is 0; the clean sound's, for references, is CLEAN_VIDEO + 1."""


def times(step: StepInputs) -> torch.Tensor:
    """[l] float32: time of each of the call's levels, from 0 (noise) to 1. Parts that a mask keeps are slightly noisy, like
    keyframes: the level's limit is below 1."""
    tensors = step.tensors
    sigma, (video_shift, sound_shift) = sigma_of(step.timestep), tensors["shifts"][0]
    sigmas = torch.stack((sigma, shifted(sigma, video_shift, sound_shift)))
    stream, share, limit = tensors["levels"][0].unbind(1)
    sigma_of_level = sigmas[stream.long()]
    return torch.minimum(1.0 - share * sigma_of_level, torch.maximum(1.0 - sigma_of_level, limit))


def _once(step: StepInputs, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`make()`, cached for all micro-steps with the same tokens."""
    key = name, step.text, step.token_order.along
    if key not in step.kept:
        step.kept[key] = make()
    return step.kept[key]


def _of_tokens(step: StepInputs, sound: torch.Tensor, words: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Values of all tokens of sound, text, and video and references -> those of the rank's tokens, in this order.

    `image`: the video's values by frame, row and column, then the references'.
    """
    places = to_device(step.token_order.places_in_class(step.grid, step.image), step.timestep.device)
    return torch.cat((sound[step.companion.slice], words[step.text_span.slice], image[places]))


def _positions(step: StepInputs) -> torch.Tensor:
    begins, words = int(step.tensors["begins"][0, 0]) / 3, step.text_tokens - step.companion_tokens
    text = F.pad(torch.arange(words, dtype=torch.float64)[:, None], (0, 2))
    sound = sound_places(begins, step.companion_tokens // CHANNELS, frame_sides(*step.grid[1:])[1])
    host = (sound, text, video_places(begins, step.grid))
    sound, text, image = (to_device(places.float(), step.timestep.device) for places in host)
    references = step.tensors.get(REFERENCE_POSITIONS)
    return _of_tokens(step, sound, text, image if references is None else torch.cat((image, references[0])))


def _numbers(step: StepInputs, levels: bool) -> torch.Tensor:
    """[n]: for each token of this rank, with `levels` the index of its noise level among those of the call, without it the
    number of its kind (text, video, sound)."""
    tensors, words = step.tensors, step.text_tokens - step.companion_tokens

    def numbers(name: str, count: int, usual: int) -> torch.Tensor:
        return tensors[name][0] if name in tensors else step.timestep.new_full((count,), usual, dtype=torch.long)

    references = numbers("reference_sound", 0, 0)
    if levels:
        sound = numbers("sound_levels", step.companion_tokens, NOISY_SOUND)
        image = torch.cat((numbers("video_levels", step.token_order.image, 0), CLEAN_VIDEO + references))
        return _of_tokens(step, sound, numbers("", words, 0), image)
    image = torch.cat((numbers("", step.token_order.image, VIDEO), SOUND * references))
    return _of_tokens(step, numbers("", step.companion_tokens, SOUND), numbers("text_kinds", words, TEXT), image)


def _runs(step: StepInputs) -> tuple[tuple[int, int, int], ...] | None:
    """Where all of a rank's tokens of a kind have one time: (first token, token behind the last one, level * KINDS + kind).
    None where some have others, which the host does not know."""
    if any(name in step.tensors for name in ("reference_sound", "sound_levels", "video_levels", "text_kinds")):
        return None
    sound, rest = len(step.companion), len(step.text)
    edges = (0, sound, NOISY_SOUND * KINDS + SOUND), (sound, rest, TEXT), (rest, rest + len(step.image), VIDEO)
    return tuple(edge for edge in edges if edge[0] < edge[1])


def arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    kinds = _once(step, "kinds", lambda: _numbers(step, levels=False))
    sound, rest = len(step.companion), len(step.text)
    references = None
    if "reference_sound" in step.tensors:
        references = _once(step, "sound references", lambda: (kinds[rest:] == SOUND).nonzero()[:, 0])
    return {
        "hidden_states": step.x,
        "audio_hidden_states": step.x_companion,
        "encoder_hidden_states": step.tensors.get("context"),
        "timestep": times(step),
        "levels": _once(step, "levels", lambda: _numbers(step, levels=True)),
        "kinds": kinds,
        "position_ids": _once(step, "positions", lambda: _positions(step)),
        "sound": slice(0, sound),
        "text_span": step.text_span.slice,
        "video": slice(rest, None),
        "sound_references": references,
        "runs": _runs(step),
        "dtype": step.dtype,
    }
