"""Residuals of ControlNets and of Fun controls: the class itself adds them between its blocks, or functions of a node do."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.unproven import Unproven

CONTROL = "control"
"""Argument of a call: kind of residuals -> [B, n, hidden] or None for each block, of the latent's n tokens in order."""
KINDS = "input", "middle", "output"
"""ComfyUI's names of residuals that the class adds itself."""
PATCHED = "noise_refiner", "double_block"
"""Kinds of patches of ComfyUI's that add to a block's tokens. The class calls them behind the block."""
AROUND = "around "
"""Beginning of the names of kinds whose residuals [B, S, hidden] are for all S tokens of a block. A function that the class
calls in place of the block adds them to the block's output."""
REPLACED, BLOCKS = "patches_replace", "dit"
"""Entry of transformer_options with functions that other nodes put in place of blocks, and the entry in it for
transformers."""
PATCHES = "patches"
"""Entry of transformer_options that has ComfyUI's patches by kind."""
TRIED = 4
"""Residuals of a kind in a trial: at least as many as a tried list has blocks, so that all are added."""
TRIED_ROWS = 13
"""Rows of a residual of AROUND in a trial, which are repeated for all tokens: their number is not known yet."""
SIDES = 1, 2, 4, 8, 16, 32
Patch = Callable[..., dict[str, Any]]
"""A function among ComfyUI's patches."""


class ReadResiduals(list[Any]):
    """Residuals of one kind. `read` is applied to each one that the class takes."""

    def __init__(self, residuals: Sequence[torch.Tensor | None], read: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(residuals)
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        residual = super().__getitem__(index)
        return self._read(residual) if isinstance(residual, torch.Tensor) else residual


def adding(residuals: Sequence[torch.Tensor | None], read: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """A patch that adds one of the residuals to the tokens "img" [B, n + m, hidden] behind the block "block_index", in place
    as ComfyUI's does. `read`: see ReadResiduals. The m tokens behind those of the latent fill it up."""

    def patch(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        index, img_BSD = arguments["block_index"], arguments["img"]
        if index < len(residuals) and (residual := residuals[index]) is not None:
            added_BND = read(residual)
            img_BSD[:, : added_BND.shape[1]] += added_BND
        return {}

    return patch


def adding_around(residual: torch.Tensor, read: Callable[[torch.Tensor, int], torch.Tensor]) -> Patch:
    """In place of a block: the block, and then a residual is added to its tokens "img" [B, S, hidden] or [S, hidden].
    `read`: (residual, tokens that the class then has) -> the residual's rows for them."""

    def patch(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](arguments)
        tokens = out["img"]
        added_BSD = read(residual, tokens.shape[-2])
        return {**out, "img": tokens + (added_BSD if tokens.ndim == added_BSD.ndim else added_BSD[0])}

    return patch


def fitted(residual_BSD: torch.Tensor, tokens: int) -> torch.Tensor:
    """A residual of AROUND with a row for each of a block's `tokens` tokens. Unproven if it has another number of rows.

    A residual of a trial has TRIED_ROWS rows, which are repeated.
    """
    if residual_BSD.shape[1] == tokens:
        return residual_BSD
    if residual_BSD.shape[1] != TRIED_ROWS:
        raise Unproven(f"a control adds to {residual_BSD.shape[1]} tokens, and there are {tokens}")
    return residual_BSD[:, torch.arange(tokens, device=residual_BSD.device) % TRIED_ROWS]


def with_patches(
    named: Mapping[str, Any],
    read: Callable[[torch.Tensor], torch.Tensor] = lambda residual: residual,
    read_of_all: Callable[[torch.Tensor, int], torch.Tensor] = fitted,
) -> dict[str, Any]:
    """A call's arguments, with functions in transformer_options that add residuals of PATCHED and AROUND. `read`: see
    ReadResiduals; `read_of_all`: see `adding_around`."""
    control, options = named.get(CONTROL) or {}, named.get(OPTIONS, {})
    patches = {kind: [adding(control[kind], read)] for kind in PATCHED if control.get(kind)}
    around = {
        (kind.removeprefix(AROUND), index): adding_around(residual, read_of_all)
        for kind, residuals in control.items()
        if kind.startswith(AROUND)
        for index, residual in enumerate(residuals)
        if residual is not None
    }
    if patches:
        options = {**options, PATCHES: options.get(PATCHES, {}) | patches}
    if around:
        replaced = options.get(REPLACED, {})
        options = {**options, REPLACED: {**replaced, BLOCKS: replaced.get(BLOCKS, {}) | around}}
    return {**named, OPTIONS: options} if patches or around else dict(named)


def for_trial(residuals: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Residuals behind each of a trial's blocks, of every kind that has any. `residuals`: see `by_name`."""
    of_kind = {
        kind: [each for name, each in residuals.items() if name.startswith(f"{kind}.")] for kind in (*KINDS, *PATCHED)
    }
    found = {kind: each[:1] * TRIED for kind, each in of_kind.items()}
    for name, residual in residuals.items():
        if name.startswith(AROUND):
            found[name.partition(".")[0]] = [residual[:, torch.arange(TRIED_ROWS) % residual.shape[1]]] * TRIED
    return found


def by_name(control: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    """The residuals of ComfyUI's `get_control` by names "<kind>.<index>"."""
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
        of_kind = control.setdefault(kind, [])
        of_kind += [None] * (int(index) + 1 - len(of_kind))
        control[kind][int(index)] = residual
    return control


def rows_of(sizes: Sequence[int], side: int) -> int:
    """Tokens of a latent of these (frames,) rows and columns. `side`: rows and columns of a token."""
    return math.prod(sizes[:-2]) * math.prod(math.ceil(size / side) for size in sizes[-2:])


def side_of(residual: torch.Tensor, sizes: Sequence[int]) -> int | None:
    """Side of a token in latent rows and columns, if `residual` [B, n, hidden] has a row for each token of a latent.

    `sizes`: the latent's (frames,) rows and columns. None: no side of SIDES gives n tokens.
    """
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

    return {
        kind: list(residuals) if kind.startswith(AROUND) else [of_others(each) for each in residuals]
        for kind, residuals in control.items()
    }
