"""What becomes on the ranks of each name that ComfyUI defines (testing/comfyui/host_names.py). Tests here prove each row.

A row of a name that ComfyUI does not have, and a name without a row, fail a test.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from testing.comfyui.host_names import NAMES

VERSIONS = {path.stem.removeprefix("comfyui-"): json.loads(path.read_text()) for path in sorted(NAMES.glob("*.json"))}
"""Version of ComfyUI -> its names. Some have only names of the files that they were "read from" (path -> commit)."""
COMPLETE = {version: names for version, names in VERSIONS.items() if "read from" not in names}
"""Those that have all names."""

PASSED = "passed"
"""It reaches the ranks, as data."""
COMPUTED = "computed"
"""ComfyUI's process computes it around the ranks' calls, as it does natively."""
HARMLESS = "harmless"
"""The native result does not depend on it."""
REFUSED = "refused"
"""ValueError by its name, or by its node's; a few are refused by ComfyUI itself."""
OUTCOMES = (PASSED, COMPUTED, HARMLESS, REFUSED)

Rows = Mapping[str, str]
"""Name -> outcome."""


def rows(**by_outcome: str) -> Rows:
    """`passed="one other"` and so on -> rows."""
    found = [(name, outcome) for outcome, names in by_outcome.items() for name in names.split()]
    assert len(found) == len(dict(found)), "a name has two rows"
    assert by_outcome.keys() <= set(OUTCOMES)
    return dict(found)


def sample_function(*_arguments: Any) -> None:
    """What a node has put on a MODEL."""


def every(table: Rows) -> pytest.MarkDecorator:
    """A test of each row, with its `name` and `outcome`."""
    return pytest.mark.parametrize(("name", "outcome"), table.items())


WRAPPERS = rows(
    computed="outer_sample prepare_sampling sampler_sample predict_noise calc_cond_batch apply_model diffusion_model"
)
WRAPPERS_IN_BANDS = {
    **dict.fromkeys(("outer_sample", "prepare_sampling"), "around all bands"),
    **dict.fromkeys(("sampler_sample", "predict_noise", "calc_cond_batch", "apply_model", "diffusion_model"), "no bands"),
}
"""Where an unknown wrapper of a kind is run under PipeFusion: once around all bands, or the run is not cut for it."""

CALLBACKS = rows(
    computed="on_clone on_load_after on_detach_after on_cleanup on_pre_run on_prepare_state on_apply_hooks "
    "on_register_all_hook_patches on_inject_model on_eject_model",
    refused="on_deepclone_multigpu on_match_multigpu_clones",
)

HOOK_TYPES = rows(passed="weight", computed="add_models transformer_options", refused="object_patch add_injections")
HOOK_SCOPES = rows(computed="all_conditioning hooked_only")
HOOK_MODES = rows(harmless="minvram maxspeed")
"""How ComfyUI caches patched weights, of which there are none here."""
HOOK_TARGETS = rows(passed="model", harmless="clip")

SETTERS = rows(
    passed="add_patches add_hook_patches",
    computed="add_callback add_callback_with_key add_wrapper add_wrapper_with_key set_additional_models add_object_patch",
    harmless="set_attachments set_hook_mode",
    refused="add_weight_wrapper set_injections",
)
"""Methods of ModelPatcher. Those whose names begin with `set_model_` put an entry into another table, whose rows hold it."""

GENERAL = {
    "set_model_patch_replace": ("dit",),
    "set_model_sampler_post_cfg_function": ("sampler_post_cfg_function",),
    "set_model_sampler_pre_cfg_function": ("sampler_pre_cfg_function",),
    "set_model_compute_dtype": ("dtype",),
}
"""Setters whose code has no name of an entry -> entries that they set, or an equal one."""

PATCHER_STATE = rows(
    passed="patches patches_uuid hook_patches injections",
    computed="object_patches model_options attachments additional_models callbacks wrappers forced_hooks hook_mode",
    refused="weight_wrapper_patches",
    # Of weights in this process, of a run, or of one copy: a MODEL on ranks has its own.
    harmless="backup backup_buffers cached_hook_patches cached_patcher_init clone_base_uuid current_hooks hook_backup "
    "force_cast_weights hook_patches_backup is_clip is_injected is_multigpu_base_clone object_patches_backup parent pinned "
    "skip_injection",
)
"""Attributes that ModelPatcher.clone() gives its clone, and what Parallelize Model makes of them."""

PATCHES = rows(
    # A patch that the class's code does not name has no effect, as natively.
    refused="attn1_patch attn2_patch double_block post_input single_block attn2_output_patch emb_patch "
    "forward_timestep_embed_patch input_block_patch input_block_patch_after_skip middle_block_after_patch middle_patch "
    "mlp_patch output_block_patch attn1_output_patch noise_refiner",
)
"""Unknown functions in transformer_options["patches"]; known ones become data (block_patches.py)."""
REPLACEMENTS = rows(refused="attn1 attn2 dit")

OPTIONS = rows(
    # Their own rows: WRAPPERS, CALLBACKS, PATCHES, REPLACEMENTS.
    computed="wrappers callbacks",
    refused="patches patches_replace optimized_attention_override",
    # Notes of the call, and of a native model for the patches inside it.
    harmless="activations_shape animate2_cache block block_index block_type cond_or_uncond context_window easycache "
    "grid_sizes img_slice minimax_h3_layout model_patch_data multigpu_thread_device original_shape "
    "prefetch_dynamic_vbars reference_image_num_tokens total_blocks transformer_index uuids",
    # The class on the ranks reads them itself, as natively.
    passed="transformer_options x_ref_attn_map sample_sigmas sigmas a2v_cross_attn ar_config ar_state "
    "audio_embeds chroma_radiance_options minimax_h3_sigma_shift_audio minimax_h3_sigma_shift_video rope_options run_ax "
    "run_vx stg_self_attn_blocks stg_skip_self_attn v2a_cross_attn k6_magcache prism_attention prism_cdf_threshold "
    "prism_sparsity qwen_image21_cache",
)
"""Entries of transformer_options."""

MODEL_OPTIONS = rows(
    computed="sampler_cfg_function sampler_pre_cfg_function sampler_post_cfg_function sampler_calc_cond_batch_function "
    "model_function_wrapper denoise_mask_function disable_cfg1_optimization context_handler registered_hooks "
    "to_load_options transformer_options",
    passed="dtype",  # of a loader
    harmless="global_average_pooling ignore_multigpu load_device offload_device multigpu_options multigpu_thread_pool "
    "optimized_attention_memory_efficient",  # for an estimate of memory
    refused="custom_operations multigpu_clones",
)
MODEL_OPTIONS_IN_BANDS = (
    *("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function", "sampler_calc_cond_batch_function"),
    *("model_function_wrapper", "denoise_mask_function", "context_handler"),
)
"""Those for which a run is not cut into bands, unless the function is known to work on a part."""
OF_A_LOADER = ("dtype", "custom_operations", "load_device", "offload_device")

ENTRIES = rows(
    passed="model_conds control",
    computed="area default gligen hooks mask mask_strength strength timestep_start timestep_end uuid",
)
"""Entries of a conditioning by which ComfyUI evaluates it."""
ENTRIES_IN_NO_BANDS = ("area", "default", "gligen", "hooks")

PIXEL_WISE, NO_BANDS = "pixel by pixel", "no bands"


_PIXEL_WISE_STEPS = (
    "cfgpp_ud10_ab ddpm deis dpm_2 dpm_2_ancestral dpm_2_ancestral_RF dpm_fast dpmpp_2m dpmpp_2m_cfg_pp dpmpp_2m_sde "
    "dpmpp_2m_sde_gpu dpmpp_2m_sde_heun dpmpp_2m_sde_heun_gpu dpmpp_2s_ancestral dpmpp_2s_ancestral_RF "
    "dpmpp_2s_ancestral_cfg_pp dpmpp_3m_sde dpmpp_3m_sde_gpu dpmpp_sde dpmpp_sde_gpu er_sde euler euler_ancestral "
    "euler_ancestral_RF euler_ancestral_cfg_pp euler_cfg_pp exp_heun_2_x0 exp_heun_2_x0_sde gradient_estimation "
    "gradient_estimation_cfg_pp heun heunpp2 ipndm ipndm_v lcm lms res_multistep res_multistep_ancestral "
    "res_multistep_ancestral_cfg_pp res_multistep_cfg_pp sa_solver sa_solver_pece seeds_2 seeds_3"
)
SAMPLERS_IN_BANDS = {
    **{f"sampling.sample_{name}": PIXEL_WISE for name in _PIXEL_WISE_STEPS.split()},
    **dict.fromkeys(("uni_pc.sample_unipc", "uni_pc.sample_unipc_bh2"), PIXEL_WISE),
    **dict.fromkeys(("sampling.sample_dpm_adaptive", "sampling.sample_ar_video"), NO_BANDS),
}
"""ComfyUI's own functions. Under PipeFusion they are run for each band, or the run is not cut. Guidance that is not known
is never cut, so that it needs no rows."""

TABLES: Mapping[str, Rows] = {
    "wrappers": WRAPPERS,
    "callbacks": CALLBACKS,
    "hook types": HOOK_TYPES,
    "hook scopes": HOOK_SCOPES,
    "hook modes": HOOK_MODES,
    "hook targets": HOOK_TARGETS,
    "patcher state": PATCHER_STATE,
    "patches": PATCHES,
    "replaced": REPLACEMENTS,
    "transformer_options": OPTIONS,
    "model_options": MODEL_OPTIONS,
    "entries": ENTRIES,
}
"""Kind of names, as in the files of names -> rows. Setters have tests of their own."""


def without_a_row(names: Mapping[str, Any]) -> list[str]:
    """The names of one ComfyUI for which there is no row, as "kind: name"."""
    tables = TABLES | {"samplers": SAMPLERS_IN_BANDS}
    found = [(kind, name) for kind, table in tables.items() for name in names.get(kind, ()) if name not in table]
    entries = PATCHES | REPLACEMENTS | OPTIONS | MODEL_OPTIONS
    for method, strings in names["setters"].items():
        known = any(each in entries for each in GENERAL.get(method, strings)) if method.startswith("set_model_") else False
        found += [] if known or method in SETTERS else [("setters", method)]
    return [f"{kind}: {name}" for kind, name in found]
