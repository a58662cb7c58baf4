"""Residuals of ControlNets and Fun controls, which the class or another node's functions add between blocks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.unproven import Unproven

CONTROL = "control"
"""Argument of a call: kind of residual -> a tensor [B, n, hidden] or None for each block. n: the latent's tokens in
order."""
KINDS = "input", "middle", "output"
"""ComfyUI's names for the residuals that the class adds itself."""
PATCHED = "noise_refiner", "double_block"
"""ComfyUI's kinds of patches that add to a block's tokens. The class calls them after the block."""
AROUND = "around "
"""Prefix of kinds whose residuals [B, S, hidden] cover all S tokens of a block. A function that the class calls instead of
the block adds them to the block's output."""
REPLACED, BLOCKS = "patches_replace", "dit"
"""Entry of transformer_options with functions that other nodes call instead of blocks, and its entry for transformers."""
PATCHES = "patches"
"""Entry of transformer_options that has ComfyUI's patches by kind."""
TRIED = 4
"""Number of residuals of each kind in a trial: at least the blocks of a tried list, so that all are added."""
TRIED_ROWS = 13
"""Rows of a residual of AROUND in a trial. They are repeated for all tokens, whose number is not known yet."""
SIDES = 1, 2, 4, 8, 16, 32
Patch = Callable[..., dict[str, Any]]
"""A function in ComfyUI's patches."""


class ReadResiduals(list[Any]):
    """Residuals of one kind. Taking one returns `read(residual)`."""

    def __init__(self, residuals: Sequence[torch.Tensor | None], read: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(residuals)
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        residual = super().__getitem__(index)
        return self._read(residual) if isinstance(residual, torch.Tensor) else residual


def adding(residuals: Sequence[torch.Tensor | None], read: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Return a patch that adds residual number "block_index" to the tokens "img" [B, n + m, hidden] in place, as ComfyUI's
    does. `read`: see ReadResiduals. The residual covers the latent's n tokens; the m tokens after them stay."""

    def patch(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        index, img_BSD = arguments["block_index"], arguments["img"]
        if index < len(residuals) and (residual := residuals[index]) is not None:
            added_BND = read(residual)
            img_BSD[:, : added_BND.shape[1]] += added_BND
        return {}

    return patch


def adding_around(residual: torch.Tensor, read: Callable[[torch.Tensor, int], torch.Tensor]) -> Patch:
    """Return a function to call instead of a block: runs the block, then adds the residual to its tokens "img", [B, S,
    hidden] or [S, hidden]. `read`: (residual, number of tokens) -> the residual's rows for these tokens."""

    def patch(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](arguments)
        tokens = out["img"]
        added_BSD = read(residual, tokens.shape[-2])
        return {**out, "img": tokens + (added_BSD if tokens.ndim == added_BSD.ndim else added_BSD[0])}

    return patch


def fitted(residual_BSD: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a residual of AROUND with a row for each of the block's `tokens` tokens. Raises Unproven if its rows do not
    fit. A residual in a trial has TRIED_ROWS rows, which are repeated."""
    if residual_BSD.shape[1] == tokens:
        return residual_BSD
    if residual_BSD.shape[1] != TRIED_ROWS:
        raise Unproven(f"a control adds to {residual_BSD.shape[1]} tokens, but the call has {tokens}")
    return residual_BSD[:, torch.arange(tokens, device=residual_BSD.device) % TRIED_ROWS]


def with_patches(
    named: Mapping[str, Any],
    read: Callable[[torch.Tensor], torch.Tensor] = lambda residual: residual,
    read_of_all: Callable[[torch.Tensor, int], torch.Tensor] = fitted,
) -> dict[str, Any]:
    """Return a call's named arguments, with functions in transformer_options that add the residuals of PATCHED and AROUND.
    `read`: see ReadResiduals. `read_of_all`: see `adding_around`."""
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
    """Residuals for a trial: of every kind in `residuals`, TRIED equal ones. `residuals`: as `by_name` returns them."""
    of_kind = {
        kind: [each for name, each in residuals.items() if name.startswith(f"{kind}.")] for kind in (*KINDS, *PATCHED)
    }
    found = {kind: each[:1] * TRIED for kind, each in of_kind.items()}
    for name, residual in residuals.items():
        if name.startswith(AROUND):
            found[name.partition(".")[0]] = [residual[:, torch.arange(TRIED_ROWS) % residual.shape[1]]] * TRIED
    return found


def by_name(control: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    """Return the residuals of ComfyUI's `get_control`, by the names "<kind>.<index>"."""
    return {
        f"{kind}.{index}": residual
        for kind, residuals in control.items()
        for index, residual in enumerate(residuals)
        if residual is not None
    }


def by_kind(residuals: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor | None]]:
    """Return the inverse of `by_name`."""
    control: dict[str, list[torch.Tensor | None]] = {kind: [] for kind in (*KINDS, *PATCHED)}
    for name, residual in residuals.items():
        kind, _, index = name.partition(".")
        of_kind = control.setdefault(kind, [])
        of_kind += [None] * (int(index) + 1 - len(of_kind))
        control[kind][int(index)] = residual
    return control


def rows_of(sizes: Sequence[int], side: int) -> int:
    """Number of tokens in a latent with these (frames,) rows and columns. `side`: latent rows and columns of a token."""
    return math.prod(sizes[:-2]) * math.prod(math.ceil(size / side) for size in sizes[-2:])


def side_of(residual: torch.Tensor, sizes: Sequence[int]) -> int | None:
    """Return the latent rows and columns of a token, if `residual` [B, n, hidden] has a row for each token of the latent.
    `sizes`: the latent's (frames,) rows and columns. None: no side in SIDES gives n tokens."""
    return next((side for side in SIDES if residual.ndim == 3 and rows_of(sizes, side) == residual.shape[1]), None)


def of_other_sizes(
    control: Mapping[str, Sequence[torch.Tensor]], sizes: Sequence[int], others: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    """Return the residuals for a latent of other sizes: their first rows, repeated if there are too few. `sizes`, `others`:
    (frames,) rows and columns of the present and of the other latent."""

    def of_others(residual: torch.Tensor) -> torch.Tensor:
        side = side_of(residual, sizes)
        assert side is not None, "others are refused before a trial"
        return residual[:, torch.arange(rows_of(others, side)) % residual.shape[1]]

    return {
        kind: list(residuals) if kind.startswith(AROUND) else [of_others(each) for each in residuals]
        for kind, residuals in control.items()
    }
