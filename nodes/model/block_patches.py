"""What other nodes change inside the native model's blocks, as data for the ranks.

Such a node puts functions into transformer_options that the native model calls from inside. They cannot run on the ranks,
where the blocks are. A function that is known by its name is turned into what it does (BlockChanges). One that the native
model takes no notice of has no effect here either. The others are left for the refusal.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

from parallel_backend.core.block_changes import BlockChanges, NormalizedGuidance
from parallel_backend.core.spans import Span
from parallel_backend.families import Family
from parallel_backend.families.base.step_inputs import Config

from ..ui.other_nodes import name_of

SKIP = re.compile(r"nodes_slg\.SkipLayerGuidance\w+\.\w+\.<locals>\.skip")
"""A block's replacement that gives out what it is given."""
PERTURBED = re.compile(r"nodes_pag\.PerturbedAttentionGuidance\.\w+\.<locals>\.perturbed_attention")
"""A replacement of attention, of a UNet's middle block: no transformer looks at it."""
NORMALIZED = re.compile(r"nodes_nag\.NAGuidance\.\w+\.<locals>\.nag_attention_output_patch")
FUN_CONTROL = re.compile(r"nodes_model_patch\.ZImageControlPatch")
"""Z-Image's Fun control, an object: what it adds is worked out in this process (fun_control.py)."""

POSITIVE, NEGATIVE = 0, 1
"""ComfyUI's numbers of the prompts, in `cond_or_uncond`."""


def block_changes(
    family: Family, config: Config, options: dict[str, Any], entries: int
) -> tuple[BlockChanges, dict[str, dict[str, Any]]]:
    """(what a model call of `entries` batch entries changes inside the blocks, what of transformer_options is left).

    The latter has the entries "patches" and "patches_replace" as they came, without what the changes are made of and
    without what has no effect on the native model.
    """
    skipped, replaced = _skipped(family, config, options.get("patches_replace", {}))
    guidance, patches = None, {}
    for name, functions in options.get("patches", {}).items():
        if name not in family.blocks.native_patches:
            continue
        for function in functions:
            if name == "attn1_output_patch" and guidance is None and is_known(NORMALIZED, function):
                guidance = _normalized(function, options.get("cond_or_uncond"), entries)
            elif name not in family.blocks.residuals or not is_known(FUN_CONTROL, type(function)):
                patches.setdefault(name, []).append(function)
    return BlockChanges(skipped, guidance), {"patches": patches, "patches_replace": replaced}


def is_known(name: re.Pattern[str], function: Callable[..., Any]) -> bool:
    """Whether it is the function of this name."""
    return name.fullmatch(name_of(function)) is not None


def _skipped(family: Family, config: Config, replaced: dict[str, dict]) -> tuple[tuple[str, ...], dict[str, dict]]:
    """(blocks "<list>.<index>" that are skipped, the other replacements)."""
    native, counts = family.blocks.native, family.blocks.counts(config)
    skipped, left = [], {}
    for name, functions in replaced.items():
        for place, function in functions.items():
            if name == "dit" and native is not None and is_known(SKIP, function):
                kind, index = place[:2]
                if kind in native and index < counts[native[kind]]:
                    skipped.append(f"{native[kind]}.{index}")
            elif not is_known(PERTURBED, function):
                left.setdefault(name, {})[place] = function
    return tuple(sorted(skipped)), left


def _normalized(function: Callable[..., Any], prompts: list[int] | None, entries: int) -> NormalizedGuidance | None:
    """None for a call that has not both prompts, which the node leaves as it is: prompts of different length are such."""
    if not prompts or POSITIVE not in prompts or NEGATIVE not in prompts:
        return None
    given = inspect.getclosurevars(function).nonlocals
    share = entries // len(prompts)
    positive, negative = (Span(0, share).shift(share * prompts.index(each)) for each in (POSITIVE, NEGATIVE))
    return NormalizedGuidance(given["nag_scale"], given["nag_tau"], given["nag_alpha"], positive, negative)
