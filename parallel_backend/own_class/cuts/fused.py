"""Fused arithmetic between a block's matrix products: rotary embeddings, norms, modulation and gates.

Plain code takes two to eight operations for each of these, some in float32: most of a step's memory traffic on a GPU. In 16
bits on a CUDA device, comfy-kitchen's kernels compute what ComfyUI's own classes do. Otherwise, and in compiled blocks,
torch's operations do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_backend.core import kitchen

Rotation = torch.Tensor
"""[1 or b, s, 1 or H, D / 2, 2, 2] float32: for each token and pair of channels the matrix (cos, -sin; sin, cos), as
comfy-kitchen's kernels read it."""


def rotated(x: torch.Tensor, turns: Rotation) -> torch.Tensor:
    """[b, s, H, D] -> the same shape: each pair of neighbouring channels rotated in float32 and rounded once."""
    # Older kernels of comfy-kitchen take the strides of all outputs from the first input.
    if (kernel := _kernel("apply_rope1", x)) is not None:
        return kernel(x.contiguous(), turns)
    if torch.compiler.is_compiling():  # torch.compile cannot make code for complex numbers, and fuses these products
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = turns[..., 0] * first[..., None] + turns[..., 1] * second[..., None]
        return pairs.flatten(-2).type_as(x)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * _complex(turns)).flatten(-2).type_as(x)


def halves_rotated(x: torch.Tensor, turns: Rotation) -> torch.Tensor:
    """Like `rotated`, but channels i and i + D / 2 are a pair."""
    if (kernel := _kernel("apply_rope_split_half1", x)) is not None:
        return kernel(x.contiguous(), turns)
    first, second = x.float().unflatten(-1, (2, -1)).unbind(-2)
    if torch.compiler.is_compiling():
        pairs = turns[..., 0] * first[..., None] + turns[..., 1] * second[..., None]
    else:
        pairs = torch.view_as_real(torch.complex(first, second) * _complex(turns))
    return pairs.transpose(-1, -2).flatten(-2).type_as(x)


def _complex(turns: Rotation) -> torch.Tensor:
    """Matrices [..., D / 2, 2, 2] -> cos + i sin [..., D / 2]. Not a lazy conjugate: each product would resolve it."""
    return torch.conj_physical(torch.view_as_complex(turns[..., 0, :].float()))


def both_rotated(
    query: torch.Tensor, key: torch.Tensor, turns: Rotation, halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, rotated as by `rotated`, or by `halves_rotated` if `halves`."""
    name, one = ("apply_rope_split_half", halves_rotated) if halves else ("apply_rope", rotated)
    if query.shape == key.shape and (kernel := _kernel(name, query)) is not None:
        return kernel(query.contiguous(), key.contiguous(), turns)
    return one(query, turns), one(key, turns)


def normed_and_rotated(
    query: torch.Tensor, key: torch.Tensor, norms: tuple[Any, Any], turns: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys [b, s, H, D], each normalized over a head's channels by its RMS norm, then rotated as by
    `rotated`."""
    of_queries, of_keys = norms
    if of_queries.weight is not None and (kernel := _kernel("rms_rope", query)) is not None:
        weights = of_queries.weight, of_keys.weight
        return kernel(query.contiguous(), key.contiguous(), turns, *weights, of_queries.eps)
    return both_rotated(of_queries(query), of_keys(key), turns)


def normed_and_partly_rotated(
    query: torch.Tensor, key: torch.Tensor, norms: tuple[Any, Any], turns: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `normed_and_rotated`, but only a head's first r channels are rotated, with i and i + r / 2 as pairs. r comes from
    `turns`, and may be less than D. The result may share memory with `query` and `key`."""
    of_queries, of_keys = norms
    turning = 2 * turns.shape[-3]
    if (kernel := _kernel("rms_rope_split_half_", query)) is not None:
        kernel(query, key, turns, of_queries.weight, of_keys.weight, of_queries.eps, turning)
        return query, key
    query, key = of_queries(query), of_keys(key)
    if turning == query.shape[-1]:
        return both_rotated(query, key, turns, halves=True)
    turned = (halves_rotated(x[..., :turning], turns) for x in (query, key))
    first, second = (torch.cat((each, x[..., turning:]), dim=-1) for each, x in zip(turned, (query, key), strict=True))
    return first, second


def modulated(norm: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift, [b, s, C]. `scale`, `shift`: [1 or b, 1 or s, C]. `norm`: a LayerNorm or an RMSNorm."""
    scale, shift = scale.to(x.dtype), shift.to(x.dtype)
    # The kernel counts elements in 32 bits, and writes past the end where there are more.
    if norm.weight is None and norm.eps is not None and x.numel() < 1 << 31:
        name = "adaln" if isinstance(norm, nn.LayerNorm) else "rms_adaln"
        if (kernel := _kernel(name, x)) is not None:
            return kernel(x, scale, shift, norm.eps)
    return torch.addcmul(shift, norm(x), 1 + scale)


def gated(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x + gate * out, [b, s, C]. `gate`: [1 or b, 1 or s, C]."""
    return torch.addcmul(x, gate.to(x.dtype), out)


Runs = Sequence[tuple[int, int, Any]]
"""(first token, token after the last one, row of their vectors) for all tokens in order. A tensor has each token's row."""


def modulated_in_runs(norm: Any, x: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Like `modulated`, but each run of tokens has its own row of the vectors [r, C]."""
    out, scales = norm(x), 1 + scales
    for start, stop, row in runs:
        torch.addcmul(shifts[row], out[:, start:stop], scales[row], out=out[:, start:stop])
    return out


def gated_in_runs(x: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Like `gated`, but each run of tokens has its own row of the gates [r, C]. The result overwrites `out`."""
    for start, stop, row in runs:
        torch.addcmul(x[:, start:stop], gates[row], out[:, start:stop], out=out[:, start:stop])
    return out


def _kernel(name: str, x: torch.Tensor) -> kitchen.Fused | None:
    """comfy-kitchen's kernel `name`, if it can compute `x`. Otherwise None."""
    if not x.is_cuda or x.element_size() != 2 or not x.numel() or x.requires_grad or torch.compiler.is_compiling():
        return None
    return kitchen.fused_kernel(name)
