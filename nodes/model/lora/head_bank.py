"""MiniMax H3's PDD acceleration LoRAs (parallel decoding distillation, arXiv 2607.26004): a bank of output heads.

The rule is that of ComfyUI from 0.34.5. Such a LoRA enlarges the rows of both output layers to those of N heads, one for
each part of a grid of timesteps. The first block of rows is a head; the others are added to it. A step uses their mean over
the parts that it spans, weighted by the parts' lengths. Ranks keep the first head as the layer's weight. Each other block is
a group of additions whose strength is its share in the step.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch

from parallel_backend.client.lora import Delta

from .lora import PREFIX, NativeWeights
from .patch_trial import Patch, shape_after

SHIFTS = {"minimax_h3_sigma_shift_video": 12.0, "minimax_h3_sigma_shift_audio": 3.0}
"""Entries of ComfyUI's transformer_options -> default values: shifts of the noise schedules of video and audio."""
BANKED = "MiniMaxH3"
"""Class of ComfyUI's supported_models that has such LoRAs."""
STREAMS = ("final_layer.video_out", "final_layer.audio_out")
"""The output layers, each with its own schedule."""
LEAVES = (".weight", ".bias")
BANK_KEYS = frozenset(PREFIX + stream + leaf for stream in STREAMS for leaf in LEAVES)
"""ComfyUI's keys of the tensors that may have the rows of several heads."""


def heads_of(weights: NativeWeights, patches: Mapping[str, list[Patch]]) -> int:
    """Number of heads in these patches. 1: there is no bank. Raises ValueError unless all its tensors have equally many."""
    counts = set()
    for key in BANK_KEYS:
        shape = weights.tensors[key.removeprefix(PREFIX)].shape
        larger = shape_after(patches.get(key, ()), shape)
        counts.add(larger[0] / shape[0] if larger[1:] == shape[1:] else 0.0)
    heads = counts.pop()
    if counts or heads < 1 or not heads.is_integer():
        raise ValueError(
            "model: the output heads of this PDD acceleration LoRA do not fit each other, or not this model. Use another "
            "file of it, or a turbo LoRA."
        )
    return int(heads)


def bank_deltas(weights: NativeWeights, patches: Mapping[str, list[Patch]], heads: int, first: int) -> Iterator[Delta]:
    """The bank as Deltas for the ranks. `first`: number of the first of the 2 * (heads - 1) groups."""
    for stream, groups in zip(STREAMS, (first, first + heads - 1), strict=True):
        for leaf in LEAVES:
            key = PREFIX + stream + leaf
            blocks = weights.patched(key, patches[key]).chunk(heads)
            yield Delta(weights.key_in_file(key), blocks[0], instead=True)
            for group, block in zip(count(groups), blocks[1:]):
                yield Delta(weights.key_in_file(key), block, group=group)


def strengths_in_call(heads: int, timestep: torch.Tensor, options: Mapping[str, Any]) -> tuple[float, ...]:
    """`head_strengths` for a model call at `timestep` (1000 sigma) with these transformer_options."""
    sigmas = options.get("sample_sigmas")
    if sigmas is None:
        raise ValueError("model: a PDD acceleration LoRA needs the sampler's sigmas. Use a sampler node, or a turbo LoRA.")
    video, sound = (float(options.get(name, usual)) for name, usual in SHIFTS.items())
    return head_strengths(heads, max(float(timestep.flatten()[0]) / 1000.0, 1e-6), sigmas, (video, sound))


def head_strengths(heads: int, sigma: float, sigmas: torch.Tensor, shifts: tuple[float, float]) -> tuple[float, ...]:
    """Strengths of the groups in the step that begins at `sigma`. `sigmas`: the sampler's. `shifts`: of video and audio."""
    nearest = int((sigmas - sigma).abs().argmin())
    following = float(sigmas[min(nearest + 1, len(sigmas) - 1)])
    start, stop = (round((1.0 - _unshifted(each, shifts[0])) * heads) for each in (sigma, following))
    start = min(start, heads - 1)
    stop = max(stop, start + 1)
    strengths = []
    for shift in shifts:
        even = torch.arange(heads, -1, -1, dtype=torch.float64) / heads
        lengths = -(shift * even / (1.0 + (shift - 1.0) * even)).diff()  # of the steps, in shifted time
        shares = torch.zeros(heads, dtype=torch.float64)
        shares[start:stop] = lengths[start:stop] / lengths[start:stop].sum()
        strengths += shares[1:].tolist()
    return tuple(strengths)


def _unshifted(sigma: float, shift: float) -> float:
    """Return the sigma that the shift maps to this one."""
    return sigma / (shift - (shift - 1.0) * sigma)
