"""A control's residuals, which a class itself adds to its tokens between its blocks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .call_arguments import OPTIONS

CONTROL = "control"
"""Argument of a call: kind of residuals -> [B, n, hidden] or None for each block, of the latent's n tokens in order."""
KINDS = "input", "middle", "output"
"""As ComfyUI names them, of what the class adds itself."""
PATCHED = "noise_refiner", "double_block"
"""Kinds of patches of ComfyUI's that add to a block's tokens. The class calls them behind the block."""
PATCHES = "patches"
"""Entry of transformer_options that has ComfyUI's patches by kind."""
TRIED = 4
"""Residuals of a kind in a trial: at least as many as a tried list has blocks, so that all are added."""
SIDES = 1, 2, 4, 8, 16, 32


class ReadResiduals(list[Any]):
    """Residuals of one kind. The class gets `read` of those that it asks for."""

    def __init__(self, residuals: Sequence[torch.Tensor | None], read: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(residuals)
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        residual = super().__getitem__(index)
        return self._read(residual) if isinstance(residual, torch.Tensor) else residual


class AddResiduals:
    """A patch that adds one of the residuals to the tokens "img" [B, n + m, hidden] behind the block "block_index", in place
    as ComfyUI's does. `read`: see ReadResiduals. The m tokens behind those of the latent fill it up."""

    def __init__(self, residuals: Sequence[torch.Tensor | None], read: Callable[[torch.Tensor], torch.Tensor]):
        self._residuals, self._read = residuals, read

    def __call__(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        index, img_BSD = arguments["block_index"], arguments["img"]
        if index < len(self._residuals) and (residual := self._residuals[index]) is not None:
            added_BND = self._read(residual)
            img_BSD[:, : added_BND.shape[1]] += added_BND
        return {}


def with_patches(
    named: Mapping[str, Any], read: Callable[[torch.Tensor], torch.Tensor] = lambda residual: residual
) -> dict[str, Any]:
    """A call's arguments, with patches in transformer_options that add residuals of PATCHED. `read`: see ReadResiduals."""
    control, options = named.get(CONTROL) or {}, named.get(OPTIONS, {})
    patches = {kind: [AddResiduals(control[kind], read)] for kind in PATCHED if control.get(kind)}
    return {**named, OPTIONS: {**options, PATCHES: options.get(PATCHES, {}) | patches}} if patches else dict(named)


def for_trial(residuals: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Residuals behind each of a trial's blocks, of every kind that has any. `residuals`: see `by_name`."""
    of_kind = {
        kind: [each for name, each in residuals.items() if name.startswith(f"{kind}.")] for kind in (*KINDS, *PATCHED)
    }
    return {kind: each[:1] * TRIED for kind, each in of_kind.items()}


def by_name(control: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    """The residuals of ComfyUI's `get_control` by "<kind>.<index>"."""
    return {
        f"{kind}.{index}": residual
        for kind, residuals in control.items()
        for index, residual in enumerate(residuals)
        if residual is not None
    }


def by_kind(residuals: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor | None]]:
    """The inverse of `by_name`."""
    control: dict[str, list[torch.Tensor | None]] = {kind: [] for kind in (*KINDS, *PATCHED)}
    for name, residual in residuals.items():
        kind, _, index = name.partition(".")
        control[kind] += [None] * (int(index) + 1 - len(control[kind]))
        control[kind][int(index)] = residual
    return control


def rows_of(sizes: Sequence[int], side: int) -> int:
    """Tokens of a latent of these (frames,) rows and columns. `side`: rows and columns of a token."""
    return math.prod(sizes[:-2]) * math.prod(math.ceil(size / side) for size in sizes[-2:])


def side_of(residual: torch.Tensor, sizes: Sequence[int]) -> int | None:
    """Latent rows and columns of a token, if a residual has a row for each token of a latent of these sizes. None: it has
    not."""
    return next((side for side in SIDES if residual.ndim == 3 and rows_of(sizes, side) == residual.shape[1]), None)


def of_other_sizes(
    control: Mapping[str, Sequence[torch.Tensor]], sizes: Sequence[int], others: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    """The residuals for a latent of other sizes: the first tokens', and those again if there are too few. `sizes`, `others`:
    (frames,) rows and columns of both."""

    def of_others(residual: torch.Tensor) -> torch.Tensor:
        side = side_of(residual, sizes)
        assert side is not None, "others are refused before a trial"
        return residual[:, torch.arange(rows_of(others, side)) % residual.shape[1]]

    return {kind: [of_others(each) for each in residuals] for kind, residuals in control.items()}
