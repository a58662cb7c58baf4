"""What of a model call reaches the ranks: tables of what does and what need not, and the refusal of everything else.

Sources: all that ComfyUI 0.3.64 and 0.33.0 put into `transformer_options` (samplers, context windows, patchers and its
models themselves), and what KJNodes, RES4LYF, TeaCache, WaveSpeed, bleh, Efficiency and NAG put there.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel_backend.core.attention_kernels import wanted
from parallel_backend.families import Family

from ..ui.other_nodes import definition, named, nodes_of, nodes_that_set

OURS = "parallel_dit_"
"""What our own entries of transformer_options begin with."""

BOOKKEEPING = frozenset(
    {
        *("sigmas", "sample_sigmas", "cond_or_uncond", "uuids", "wrappers", "callbacks"),  # samplers
        *("prefetch_dynamic_vbars", "multigpu_thread_device", "context_window", "easycache"),
        # What a native model notes for the patches inside it.
        *("block", "block_index", "block_type", "total_blocks", "transformer_index", "img_slice", "grid_sizes"),
        *("original_shape", "activations_shape", "reference_image_num_tokens", "model_patch_data"),
    }
)
"""Entries of transformer_options that say something about the call. No native model's result depends on them."""

READ_BY: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("stg_self_attn_blocks", "a2v_cross_attn", "v2a_cross_attn", "run_vx", "run_ax"), frozenset({"LTXAV"})),
    "stg_skip_self_attn": frozenset({"LTXAV", "LTXV"}),
    **dict.fromkeys(("minimax_h3_sigma_shift_video", "minimax_h3_sigma_shift_audio"), frozenset({"MiniMaxH3"})),
    # Of models that no family is; and keys that are made once instead of at every step, which give the same picture.
    **dict.fromkeys(("chroma_radiance_options", "ar_config", "ar_state", "animate2_cache", "audio_embeds"), frozenset()),
    "rope_options": frozenset(
        {
            *("Flux", "FluxInpaint", "FluxSchnell", "Flux2", "LongCatImage", "Lumina2", "ZImage"),
            *("ErnieImage", "Kandinsky5", "Kandinsky5Image", "WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN22_T2V"),
            *("WAN21_Camera", "WAN22_Camera", "WAN21_Vace", "WAN22_Animate", "WAN21_SCAIL", "WAN21_SCAIL2"),
        }
    ),
}
"""Entry of transformer_options that a native model computes with -> the classes of ComfyUI's supported_models that do. All
others ignore it, and so do we. A family that reads it too has it in `Inputs.options`."""

FOR_PATCHES = frozenset(
    {
        # RES4LYF: its samplers set them, its own models read them. Those come by object patches, which are refused.
        *(
            "regional_conditioning_weight",
            "regional_conditioning_floor",
            "regional_conditioning_mask_orig",
            "sigma_next",
            "z_",
        ),
        *("regional_conditioning_weight_neg", "regional_conditioning_floor_neg"),
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
"""Entries of transformer_options that packs leave for patches of their own. The native model takes no notice of them, and
where such a patch is inside the model, that patch is refused."""

HARMLESS = ("crossattn_controlnet",)
"""Arguments of a model call that native models do not look at."""

EXACT_KERNELS = ("attention_pytorch", "attention_flash", "attention_xformers", "attention_split", "attention_sub_quad")
"""ComfyUI's attention kernels that differ from each other by rounding only, and so from those of the ranks."""

INSTEAD = {
    r"(?<!kv)(?<!kv )cache": "Take Parallel Step Cache in its place",
    "compile": "Switch on `compile` in Parallel DiT Loader in its place",
    "attention kernel": "Ulysses Config's widget attention chooses the ranks' kernel: take that in its place",
}
"""Pattern of what a node's name, or what is refused, has in it -> what to take in its place. A KV cache skips no steps."""


@dataclass(frozen=True)
class Unread:
    """Something on a MODEL that the ranks would know nothing of."""

    what: str
    """In words."""
    source: Any = None
    """The function or object that another node has put there."""
    entry: str = ""
    """The entry of transformer_options that it is."""
    by: str = ""
    """The node that does it now, where that is known."""

    def described(self) -> str:
        """With the node that it comes from, or else the function."""
        made = None if self.source is None else definition(self.source)
        nodes = self.by or (named(nodes_of(made)) if made else "")
        nodes = nodes or (named(nodes_that_set(self.entry)) if self.entry else "")
        if nodes:
            return f"{nodes} ({self.what})"
        return f"{self.what} ({made.__qualname__} of {made.__module__})" if made else self.what


def refuse_what_does_not_reach_the_ranks(
    options: Mapping[str, Any], unknown: Iterable[str], family: Family, attention: str
) -> None:
    """ValueError for anything that changes the native model's result and would be ignored: it names node and entry.

    `options`: a call's transformer_options, without the patches that do reach them (block_patches.py). `unknown`: arguments
    of the call that the family does not take. `attention`: the ranks' kernel (core/attention_kernels.py).
    """
    conditioning = (Unread(f"'{name}' conditioning") for name in unknown if name not in HARMLESS)
    refuse_unread([*unread(options, family, attention), *conditioning])


def refuse_unread(found: Iterable[Unread]) -> None:
    """ValueError that names all of `found` and what to do. Nothing happens if there is none."""
    if not (described := list(dict.fromkeys(each.described() for each in found))):
        return
    text = ", ".join(described)
    advice = [instead for pattern, instead in INSTEAD.items() if re.search(pattern, text.lower())]
    advice = "; ".join(advice) + ", or load" if advice else "Remove the node that adds it, or load"
    advice += " the model with a native loader, without Parallelize Model."
    raise ValueError(f"model: {text} cannot be forwarded to Parallel DiT's ranks in this version. {advice}")


def unread(options: Mapping[str, Any], family: Family, attention: str) -> Iterator[Unread]:
    """Entries of transformer_options that change what the native model computes and that the ranks do not read."""
    for name, value in options.items():
        if name in ("patches", "patches_replace"):
            yield from _patches(name, value)
        elif name == "optimized_attention_override":
            if value is not None and not (chooses_exact_kernel(value) and wanted(attention)[0].exact):
                yield Unread("an attention kernel set on the MODEL", value)
        elif value is None or name in BOOKKEEPING or name in FOR_PATCHES or name.startswith(OURS):
            continue
        elif name not in READ_BY or (_is_read(name, family) and _asks(name, value)):
            yield Unread(f"the entry '{name}' of transformer_options", entry=name)


def chooses_exact_kernel(override: Any) -> bool:
    """Whether an override of ComfyUI's attention, such as Model Attention Backend's, is one of EXACT_KERNELS."""
    if getattr(override, "__module__", None) != "comfy.model_patcher":
        return False
    chosen = inspect.getclosurevars(override).nonlocals.get("optimized_attention")
    return getattr(chosen, "__name__", None) in EXACT_KERNELS


def _patches(table: str, patches: Mapping[str, Any]) -> Iterator[Unread]:
    for name, functions in patches.items():
        what = f"model patch '{name}'" if table == "patches" else f"attention replacement '{name}'"
        for function in functions.values() if isinstance(functions, Mapping) else functions:
            yield Unread(what, function)


def _is_read(name: str, family: Family) -> bool:
    """Whether the family's native models read an entry that the family does not."""
    return name not in family.inputs.options and not READ_BY[name].isdisjoint(family.native_classes)


def _asks(name: str, value: Any) -> bool:
    """Whether the value asks for something else than the usual."""
    if name == "rope_options":
        return any(each != (1.0 if key.startswith("scale") else 0.0) for key, each in value.items())
    return value is not True if name.startswith(("run_", "a2v", "v2a")) else bool(value)
