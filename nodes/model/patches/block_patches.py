"""Other nodes' changes inside the native model's blocks, as data for the ranks.

Such a node puts functions into transformer_options, which the native model calls between its blocks. They cannot run on the
ranks, which have the blocks. A function whose name is known becomes data with the same effect (BlockChanges). All other
functions stay, and reach.py refuses them.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.residuals import BLOCKS
from parallel_backend.own_class.cuts.guided_attention import OUTPUT

from ...ui.other_nodes import is_known
from ..controls.sequence_control import below_controls
from . import sparse_attention as sparse_node
from .attention_choice import chosen_attention

SKIP = re.compile(r"nodes_slg\.SkipLayerGuidance\w+\.\w+\.<locals>\.skip")
"""A replacement for a block that returns its input: the block is skipped."""
PERTURBED = re.compile(r"nodes_pag\.PerturbedAttentionGuidance\.\w+\.<locals>\.perturbed_attention")
"""A replacement for the attention of a UNet's middle block, which no transformer has."""
NORMALIZED = re.compile(r"nodes_nag\.NAGuidance\.\w+\.<locals>\.nag_attention_output_patch")

POSITIVE, NEGATIVE = 0, 1
"""ComfyUI's numbers for the prompts in `cond_or_uncond`."""


def kernel_of_call(override: Any, loaded: str, preferred: str) -> tuple[str, Any]:
    """(BlockChanges.attention of a call with this override of attention, the override if ranks do not know its kernel).

    `loaded`: the kernel with which the model was loaded. `preferred`: the one that its file asks for, used if no node chose
    one."""
    if override is None:
        return preferred, None
    below = sparse_node.below(override)
    chosen = None if below is None else chosen_attention(below, loaded)
    return chosen or "", None if chosen is not None else below


def skipped_keys(replaced: Mapping[str, Mapping[Any, Any]]) -> tuple[dict[tuple[str, int], Any], dict[str, dict[Any, Any]]]:
    """Return ((kind, number) of each skipped block -> the function for it, the other replacements)."""
    skipped: dict[tuple[str, int], Any] = {}
    remaining: dict[str, dict[Any, Any]] = {}
    for name, functions in replaced.items():
        for block, around in functions.items():
            if (function := below_controls(around)) is None:
                continue
            if name == BLOCKS and len(block) == 2 and is_known(SKIP, function):
                skipped[block] = function
            elif not is_known(PERTURBED, function) and not is_known(sparse_node.BLOCK, function):
                remaining.setdefault(name, {})[block] = function
    return skipped, remaining


def sparse_blocks(replaced: Mapping[str, Mapping[Any, Any]]) -> Callable[..., Any] | None:
    """Model Sparse Attention's patch of a block, if a block has one."""
    inside = (below_controls(function) for functions in replaced.values() for function in functions.values())
    return next((each for each in inside if is_known(sparse_node.BLOCK, each)), None)


def normalized_guidance(
    options: Mapping[str, Any], entries: int
) -> tuple[Callable[..., Any] | None, NormalizedGuidance | None, dict[str, list[Any]]]:
    """Return (NAG's function in the transformer_options of a call with `entries` batch entries, its settings, the other
    patches)."""
    patches = {name: list(functions) for name, functions in options.get("patches", {}).items()}
    functions = patches.get(OUTPUT, [])
    nag = next((function for function in functions if is_known(NORMALIZED, function)), None)
    if nag is None:
        return None, None, patches
    functions.remove(nag)
    return nag, _normalized(nag, options.get("cond_or_uncond"), entries), patches


def _normalized(function: Callable[..., Any], prompts: list[int] | None, entries: int) -> NormalizedGuidance | None:
    """NAG's settings. None for a call without both prompts, which the node does not change (prompts of different
    lengths)."""
    if not prompts or POSITIVE not in prompts or NEGATIVE not in prompts:
        return None
    settings = inspect.getclosurevars(function).nonlocals
    share = entries // len(prompts)
    positive, negative = (Span(0, share).shift(share * prompts.index(each)) for each in (POSITIVE, NEGATIVE))
    return NormalizedGuidance(settings["nag_scale"], settings["nag_tau"], settings["nag_alpha"], positive, negative)
