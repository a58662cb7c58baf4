"""Calls of ComfyUI's own class for a trial: the values they may have, and the properties by which calls are alike."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.ldm.modules.attention
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import Residuals
from parallel_backend.core.block_changes import BlockChanges, NormalizedGuidance
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.sparse_attention import SparseAttention
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.built.counts import counted
from parallel_backend.own_class.calls.call_arguments import LATENTS, OPTIONS, STRUCTURE, TIMES
from parallel_backend.own_class.calls.patching import Latents, Patching, latents_of
from parallel_backend.own_class.calls.residuals import PATCHES, REPLACED, by_name, side_of
from parallel_backend.own_class.calls.tried_calls import Call, numbers_of
from parallel_backend.own_class.plans.plan import Asked

from ..controls.controlnet import Control, refuse_control
from ..controls.fun_control import without_fun_controls
from ..loading.class_code import class_code
from ..patches.attention_choice import preferred_attention
from ..patches.block_patches import kernel_of_call, normalized_guidance, skipped_keys, sparse_blocks
from ..patches.reach import OVERRIDE, told_to_own_class
from ..patches.sparse_attention import is_sparse as has_override
from ..patches.sparse_attention import settings_of
from ..patches.text_guidance import GUIDANCE_KEY, TextGuidance

HEEDS_FILES = hasattr(comfy.ldm.modules.attention, "ComfyAttention")
"""Whether ComfyUI respects the attention that a model's file asks for (0.37 and newer)."""
OF_UNETS = "comfy.ldm.modules.attention"
"""Module of UNets' blocks. All classes import it for its attention functions."""


def on_host(values: Any) -> dict[str, Any]:
    """Return the values, with all tensors in host memory."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(values))


def shapes(tensors: dict[str, torch.Tensor]) -> Any:
    """Return the names and shapes of a call's conditioning tensors, whatever the batch. Leading sides of 1 are removed,
    because they may belong to a tensor that entries share, or to a single entry."""
    sides = {name: tuple(itertools.dropwhile(lambda side: side == 1, each.shape[1:])) for name, each in tensors.items()}
    return frozenset((name, each) for name, each in sides.items() if name != STRUCTURE)


def returned(latents: Latents) -> torch.Tensor | list[torch.Tensor]:
    """Return a call's outputs in the form in which ComfyUI's classes return them."""
    return list(latents) if len(latents) > 1 else latents[0]


def by_entry(x: Any, timestep: Any, named: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits a call's arguments by batch entry: tensors, and lists of latents and timesteps."""
    entries = len(x if isinstance(x, torch.Tensor) else x[0])

    def one(value: Any, entry: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value[entry : entry + 1] if value.ndim and len(value) == entries else value
        return [one(each, entry) for each in value] if isinstance(value, list | tuple) else value

    for entry in range(entries):
        yield {name: one(value, entry) for name, value in {"x": x, "timestep": timestep, **named}.items()}


def joined(outputs: Sequence[torch.Tensor | list[torch.Tensor]]) -> torch.Tensor | list[torch.Tensor]:
    """Return the outputs of one call, from those of calls with one entry each."""
    latents = [latents_of(each if isinstance(each, torch.Tensor) else tuple(each)) for each in outputs]
    return returned(tuple(torch.cat(parts) for parts in zip(*latents, strict=True)))


def own_residuals(control: Control | None, x: torch.Tensor, bands: Patching | None) -> Residuals:
    """Return a ControlNet's residuals for the latent `x`, by the names that ranks use. Raises ValueError for outputs of
    another size. `bands`: the patching if the latent is a band or is cut into bands. Tokens are then in the patching's
    order, otherwise in raster order."""
    residuals = by_name(control or {})
    for residual in residuals.values():
        if side_of(residual, x.shape[2:]) is None or len(residual) != len(x):
            refuse_control(f"an output is {list(residual.shape)}, which has no row for each of the latent's tokens")
    order = None if bands is None else bands.order(bands.grid(tuple(x.shape)))
    if order is None:
        return residuals
    packed = {id(each): each[:, order] for each in residuals.values()}  # blocks that share a tensor share it from here on
    return {name: packed[id(each)] for name, each in residuals.items()}


@dataclass(frozen=True)
class NodeChanges:
    """Changes inside the class that other nodes request in a call."""

    skipped: Mapping[tuple[str, int], Any] = field(default_factory=dict)
    """(kind, number) of each skipped block -> the function that replaces it."""
    nag: Callable[..., torch.Tensor] | None = None
    """The function of ComfyUI's NAGuidance."""
    guidance: NormalizedGuidance | None = None
    """The settings of ComfyUI's NAGuidance. None: it does not change the call."""
    text: TextGuidance | None = None
    """The guidance of WanVideoNAG."""

    @property
    def of_batch(self) -> bool:
        """Whether some of the changes are for single batch entries."""
        return self.guidance is not None or self.text is not None

    def __bool__(self) -> bool:
        return bool(self.skipped) or self.of_batch


def changes_and_options(
    checkpoint: Checkpoint, loaded: str, options: Mapping[str, Any], entries: int
) -> tuple[BlockChanges, NodeChanges, dict[str, Any]]:
    """Return (attention of a call with `entries` batch entries, other nodes' changes in it, transformer_options for ranks).
    `loaded`: see chosen_attention. Raises ValueError for options that ranks cannot get, see told_to_own_class."""
    built, override = checkpoint.built, options.get(OVERRIDE)
    preferred = preferred_attention(checkpoint, loaded) if HEEDS_FILES else ""
    kernel, unknown = kernel_of_call(override, loaded, preferred)
    replaced = options.get(REPLACED) or {}
    skipped, replaced = ({}, replaced) if built.own.unet else skipped_keys(replaced)
    nag, guidance, patches = normalized_guidance(without_fun_controls(built.own.kind, options), entries)
    if patches:
        read = _code_of_calls(replace(built.own, blocks=(), latent=None))
        patches = {kind: functions for kind, functions in patches.items() if kind in read}
    told = told_to_own_class({**options, OVERRIDE: unknown, REPLACED: replaced, PATCHES: patches}, built.options)
    return (
        BlockChanges(attention=kernel),
        NodeChanges(skipped, nag, guidance, options.get(GUIDANCE_KEY)),
        told,
    )


def sparse_attention(
    checkpoint: Checkpoint, options: Mapping[str, Any], latents: Latents, arguments: Mapping[str, Any], native: type
) -> SparseAttention | None:
    """Model Sparse Attention's settings for a call whose blocks are proven. None: its attention is dense. `native`: the
    class."""
    built, of_block = checkpoint.built, sparse_blocks(options.get(REPLACED) or {})
    found = settings_of(options.get(OVERRIDE), of_block, built.counts, options)
    if found is None:
        return None
    segments, grid = adapter_of(built.own.kind).segments(latents, arguments, native)
    return replace(found, segments=segments, grid=grid)


def is_sparse(options: Mapping[str, Any]) -> bool:
    """Whether Model Sparse Attention has added anything to a call's transformer_options."""
    return has_override(options.get(OVERRIDE)) or sparse_blocks(options.get(REPLACED) or {}) is not None


@functools.lru_cache(maxsize=4)
def _code_of_calls(own: OwnClass) -> str:
    """Return the code that can call a patch of another node: the class's module and those that it imports.

    A patch of a kind that this code does not name has no effect, as in ComfyUI itself. The module of UNets' blocks is left
    out, unless the class has such blocks."""
    used = {type(module).__module__ for module in build(own).modules()}
    return "\n".join(text.decode() for name, text in class_code(own, helpers=False) if name != OF_UNETS or name in used)


def structure(call: Call, sizes: tuple[int, ...]) -> str:
    """Key for trials: the form of the call, the batch, and the names of options that ranks do not get. `sizes`: see form."""
    return repr((len(call.x), form(call, sizes), sorted(map(str, call.options))))


def form(call: Call, sizes: tuple[int, ...]) -> str:
    """Text of the call's structure: names and axes of its tensors, and its values that are neither tensors nor numbers.

    `sizes`: of the whole latent. A single frame has another structure than several frames. Only the dtypes of timesteps and
    integers count, because a trial draws other values in float32.
    """
    numbers = numbers_of(call)

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return "floats" if value.is_floating_point() else str(value.dtype), value.ndim
        if name == LATENTS or (name == TIMES and isinstance(value, list)):
            return [len(shape) for shape in value]
        if isinstance(value, dict) and name != OPTIONS:
            return {key: shown(f"{name}/{key}", each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [shown(f"{name}/{index}", each) for index, each in enumerate(value)]
        return type(value) if name in numbers else repr(value)

    named = {name: shown(name, value) for name, value in call.named.items()}
    single = [size == 1 for size in sizes]
    return repr((single, call.timestep.dtype, named))


def widths_of(call: Call) -> frozenset[tuple[str, int, bool]]:
    """Return (name, channels, whether it is empty) of each of the call's tensors and latents."""
    latents = {f"latent {number}": latent.movedim(1, -1) for number, latent in enumerate(call.latents)}
    values = {**call.named, **latents}.items()
    return frozenset(
        (name, each.shape[-1], 0 in each.shape) for name, each in values if isinstance(each, torch.Tensor) and each.ndim
    )


def asked(call: Call, sizes: tuple[int, ...], times: Sequence[float], sequence: bool, bands: bool, tensor: int) -> Asked:
    """Return the requirements that a shipped plan has to meet for this call. `times`: the model's. `sizes`: see form."""
    names = frozenset(map(str, call.options))
    return Asked(form(call, sizes), names, tuple(near(times)), len(call.x), numbers_of(call), sequence, bands, tensor)


def times_of(sampling: Any) -> tuple[float, ...]:
    """Return the first and last timestep of ComfyUI's model sampling, and one between them, as the class gets them."""
    first, last = float(sampling.sigma_max), float(sampling.sigma_min)
    sigmas = torch.tensor([first, (first + last) / 2, last])
    return tuple(dict.fromkeys(sampling.timestep(sigmas).float().tolist()))


def share_of_work(own: OwnClass, call: Call) -> str:
    """A line that says what share of a step's operations the ranks split. Every rank does the rest. Empty: unknown."""
    counts = counted(own, call)
    return "" if counts is None else f"{100 * counts.shared:.1f} % of a step's operations are shared out"


def near(times: Sequence[float]) -> list[float]:
    """Return timesteps for a trial's key. Timesteps with equal results need no other trial: the first one is exact, others
    are rounded to a tenth of it. The last one depends a little on the image's size, by the shift of the sigmas."""
    scale = (times[0] or 1.0) if times else 1.0  # a logarithm of a sigma of 1 is a time of 0
    return [*(round(time, 3) for time in times[:1]), *(round(time / scale, 1) for time in times[1:])]
