"""Refuses everything in a model call that would change the native model's result but does not reach the ranks.

The tables list the entries of `transformer_options` that need not reach them: of ComfyUI (samplers, context windows,
patchers, models), and of KJNodes, RES4LYF, TeaCache, WaveSpeed, bleh, Efficiency and NAG.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...ui.other_nodes import definition, named, nodes_of, nodes_that_set
from ..native.native_call import is_plain

OURS = "parallel_dit_"
"""Prefix of this pack's entries of transformer_options."""

TABLES = {"patches": "model patch", "patches_replace": "attention replacement"}
"""Entries of transformer_options with other nodes' functions -> what such a function is called."""
OVERRIDE = "optimized_attention_override"
"""The entry with a function that replaces ComfyUI's attention."""

BOOKKEEPING = frozenset(
    {
        *("cond_or_uncond", "uuids", "wrappers", "callbacks"),  # samplers
        *("prefetch_dynamic_vbars", "multigpu_thread_device", "context_window", "easycache"),
        # Notes of a native model for the patches inside it.
        *("block", "block_index", "block_type", "total_blocks", "transformer_index", "img_slice", "grid_sizes"),
        *("original_shape", "activations_shape", "reference_image_num_tokens", "model_patch_data"),
        "minimax_h3_layout",
        "animate2_cache",  # of WanAnimate2Cache: it changes no result, and ranks compute the pose at every step
    }
)
"""Entries of transformer_options that describe the call. No native model's result depends on them."""

FOR_PATCHES = frozenset(
    {
        # RES4LYF: its samplers set them for its models, which come by object patches and are refused.
        *(f"regional_conditioning_{name}" for name in ("weight", "floor", "mask_orig", "weight_neg", "floor_neg")),
        *("sigma_next", "z_"),
        *("AttnMask", "AttnMask_neg", "RegContext", "RegContext_neg", "ExtraOptions", "StyleMMDiT", "update_cross_attn"),
        *("x_init", "x_tmp", "y0", "y0_inv", "y0_standard_guide", "y0_inv_standard_guide", "model_sampling", "latent_type"),
        *("y0_adain", "blocks_adain", "blocks_adain_cache", "sort_and_scatter", "noise_mode_adain", "y0_attninj"),
        *("blocks_attninj", "blocks_attninj_qkv", "blocks_attninj_cache", "yt_positive", "yt_negative", "row", "patch_size"),
        *(f"freqsep_{name}" for name in ("lowpass_method", "sigma", "kernel_size", "inner_kernel_size", "stride", "mask")),
        *("freqsep_lowpass_weight", "freqsep_highpass_weight", "y0_style_method"),
        *(f"y0_style_tile_{name}" for name in ("height", "width", "padding")),
        *(
            f"y0_style_{sign}{name}"
            for sign in ("pos", "neg")
            for name in ("", "_weight", "_synweight", "_mask", "_mask_edge")
        ),
        # TeaCache and NAG, KJNodes, Efficiency.
        *("enable_teacache", "rel_l1_thresh", "coefficients", "cache_device", "model_type", "current_percent"),
        *("enhance_weight", "krea2_token_weights", "minimax_head_chunks", "sol_take_forward", "promptrelay_mask_fn"),
        "from_smZ",
    }
)
"""Entries of transformer_options that packs set for their own patches. The native model ignores them, and a patch inside the
model is refused as such."""

INSTEAD = {
    r"(?<!kv)(?<!kv )cache": "Use Parallel Step Cache instead",
    "compile": "Turn on `compile` in Parallel DiT Loader instead",
    "attention kernel": "Set the ranks' kernel by attention in Ulysses Config instead",
}
"""Pattern in the refused object's or its node's name -> advice. A KV cache, which skips no steps, has no replacement."""


@dataclass(frozen=True)
class Unread:
    """Something on a MODEL that the ranks would ignore."""

    what: str
    """Its description for the user."""
    source: Any = None
    """The function or object that another node has put there."""
    entry: str = ""
    """The key, if it is an entry of transformer_options."""
    by: str = ""
    """The node that is doing it, if known."""

    def described(self) -> str:
        """Return the description with the responsible node, or with the function if the node is unknown."""
        function = None if self.source is None else definition(self.source)
        nodes = self.by or (named(nodes_of(function)) if function else "")
        nodes = nodes or (named(nodes_that_set(self.entry)) if self.entry else "")
        if nodes:
            return f"{nodes} ({self.what})"
        return f"{self.what} ({function.__qualname__} of {function.__module__})" if function else self.what


def told_to_own_class(options: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """Return the entries of transformer_options that ranks get for ComfyUI's own class, which may read any of them. `ours`:
    entries of this pack that they also get. Raises ValueError, with node and entry, for anything that may change the native
    model's result and does not reach the ranks."""
    others = {
        name: value
        for name, value in options.items()
        if value is not None
        and not (name in BOOKKEEPING or name in FOR_PATCHES or name in (*TABLES, OVERRIDE))
        and (name in ours or not name.startswith(OURS))
    }
    others = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in others.items()}
    told = {name: value for name, value in others.items() if is_plain(value)}
    refuse_unread(_patches(options))
    # A trial has tensors, such as the run's sigmas, on the one side alone, and so finds out whether the class reads them.
    unsent = (name for name in others if name not in told and not isinstance(others[name], torch.Tensor))
    refuse_unread(Unread(f"the entry '{name}' of transformer_options", entry=name) for name in unsent)
    return told


def refuse_unread(refused: Iterable[Unread]) -> None:
    """Raise ValueError that names everything in `refused`, with advice. Does nothing if `refused` is empty."""
    if not (described := list(dict.fromkeys(each.described() for each in refused))):
        return
    text = ", ".join(described)
    replacements = [instead for pattern, instead in INSTEAD.items() if re.search(pattern, text.lower())]
    raise ValueError(
        f"model: {text} cannot be sent to Parallel DiT's ranks. "
        f"{'; '.join(replacements) or 'Remove the node that adds it'}, or load the model with ComfyUI's own loader, "
        "without Parallelize Model."
    )


def _patches(options: Mapping[str, Any]) -> Iterator[Unread]:
    for table, what in TABLES.items():
        for name, functions in options.get(table, {}).items():
            for function in functions.values() if isinstance(functions, Mapping) else functions:
                yield Unread(f"{what} '{name}'", function)
    if options.get(OVERRIDE) is not None:
        yield Unread("an attention kernel set on the MODEL", options[OVERRIDE])
