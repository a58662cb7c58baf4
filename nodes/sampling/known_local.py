"""Tables of functions of ComfyUI's nodes and of other packs, by how much of the latent they need.

Functions are listed by their `name_of`. A new row also belongs into the test that compares bands with the whole latent:
tests/comfyui/inside/guidance_in_bands.py.
"""

import inspect
from typing import Any

from ..ui.other_nodes import name_of

PIXEL_WISE_GUIDANCE = frozenset(
    {
        "nodes_cfg.CFGNorm.execute.<locals>.cfg_norm",
        "nodes_cfg.CFGNorm.execute.<locals>.cfg_norm_pre",
        "nodes_custom_sampler.CFGOverride.execute.<locals>.predict_noise_wrapper",
        "nodes_eps.EpsilonScaling.execute.<locals>.epsilon_scaling_function",
        "nodes_eps.TemporalScoreRescaling.execute.<locals>.temporal_score_rescaling",
        "nodes_lt.LTXVModalityGuidance.execute.<locals>.post_cfg_function",
        "nodes_lt.LTXVReferenceAudio.execute.<locals>.post_cfg_function",
        "nodes_lt.LTXVSpatioTemporalGuidance.execute.<locals>.post_cfg_function",
        "nodes_pag.PerturbedAttentionGuidance.execute.<locals>.post_cfg_function",
        "nodes_slg.SkipLayerGuidanceDiTSimple.execute.<locals>.calc_cond_batch_function",
        "nodes_video_model.VideoLinearCFGGuidance.patch.<locals>.linear_cfg",  # along the batch, which is not cut
        "nodes_video_model.VideoTriangleCFGGuidance.patch.<locals>.linear_cfg",
        # Skimmed CFG: all its modes but those of Difference CFG
        "skimmed_CFG.CFG_skimming_single_scale_pre_cfg_node.patch.<locals>.pre_cfg_patch",
        "skimmed_CFG.skimReplacePreCFGNode.patch.<locals>.pre_cfg_patch",
        "skimmed_CFG.SkimmedCFGLinInterpCFGPreCFGNode.patch.<locals>.pre_cfg_patch",
        "skimmed_CFG.SkimmedCFGLinInterpDualScalesCFGPreCFGNode.patch.<locals>.pre_cfg_patch",
        # essentials
        "sampling.GuidanceTimestepping.execute.<locals>.apply_apg",
    }
)
"""Options and wrappers of a MODEL whose result at a pixel only depends on their inputs at that pixel. Norms over channels
are norms of one pixel."""

WHOLE_GUIDANCE = {
    "nodes_apg.APG.execute.<locals>.pre_cfg_function": (),
    "nodes_cfg.CFGZeroStar.execute.<locals>.cfg_zero_star": (),
    "nodes_fresca.FreSca.execute.<locals>.custom_cfg_function": (),
    "nodes_latent.LatentApplyOperationCFG.execute.<locals>.pre_cfg_function": (),
    "nodes_lumina2.RenormCFG.execute.<locals>.renorm_cfg_func": (),
    "nodes_mahiro.Mahiro.execute.<locals>.mahiro_normd": (),
    "nodes_model_advanced.RescaleCFG.patch.<locals>.rescale_cfg": (),
    "nodes_perpneg.PerpNeg.execute.<locals>.cfg_function": (),
    "nodes_slg.SkipLayerGuidanceDiT.execute.<locals>.post_cfg_function": (),
    "nodes_tcfg.TCFG.execute.<locals>.tangential_damping_cfg": (),
    # Skimmed CFG
    "skimmed_CFG.differenceCFGPreCFGNode.patch.<locals>.pre_cfg_patch": (),
    # Dynamic Thresholding
    "dynthres_comfyui.DynamicThresholdingComfyNode.patch.<locals>.sampler_dyn_thresh": ("dynamic_thresh",),
    "dynthres_comfyui.DynamicThresholdingSimpleComfyNode.patch.<locals>.sampler_dyn_thresh": ("dynamic_thresh",),
    # KJNodes
    "model_optimization_nodes.CFGZeroStarAndInit.patch.<locals>.cfg_zerostar": (),
    "model_optimization_nodes.PiDColorBiasCorrection.patch.<locals>.pid_bias_post_cfg": (),
    # Inspire
    "regional_nodes.RegionalCFG.doit.<locals>.regional_cfg": (),
    # bleh
    "misc.ContrastiveOrthoCFG.precfg_patch": (),
    "misc.ContrastiveOrthoCFG.postcfg_patch": (),
}
"""Options of a MODEL that need the whole latent, but nothing of other steps except what they store in their closures. Value:
names of the closure variables whose objects they change in place. (Variables that they rebind need no name.)"""

PIXEL_WISE_AT_ZERO = {"nodes_slg.SkipLayerGuidanceDiT.execute.<locals>.post_cfg_function": "rescaling_scale"}
"""Functions of WHOLE_GUIDANCE that are pixel-wise if this closure variable is 0."""

OPERATION = {"nodes_latent.LatentApplyOperationCFG.execute.<locals>.pre_cfg_function": "operation"}
"""Functions of WHOLE_GUIDANCE that call an exchangeable function -> the closure variable with that function."""

OPERATIONS = frozenset(
    {
        "nodes_latent.LatentOperationSharpen.execute.<locals>.sharpen",
        "nodes_latent.LatentOperationTonemapReinhard.execute.<locals>.tonemap_reinhard",
    }
)
"""Functions for OPERATION without state and randomness: all bands that call them get the same result."""

PIXEL_WISE_GUIDERS = frozenset(
    {
        "samplers.CFGGuider",
        "nodes_custom_sampler.Guider_Basic",
        "nodes_custom_sampler.Guider_DualCFG",
        "nodes_lt.Guider_LTXAVDualCFG",
        "nodes.Guider_ScheduledCFG",  # KJNodes
        "sampler_nodes.Guider_scheduled",  # Inspire
    }
)
"""Classes of guiders whose result at a pixel only depends on the predictions at that pixel."""

WHOLE_GUIDERS = frozenset({"nodes_perpneg.Guider_PerpNeg", "sampler_nodes.Guider_PerpNeg_scheduled"})
"""Classes of guiders that need the predictions for the whole latent."""

PIXEL_WISE_MASKS = frozenset(
    {
        "nodes_differential_diffusion.DifferentialDiffusion.execute.<locals>.<lambda>",
        "nodes.DifferentialDiffusionAdvanced.forward",  # KJNodes
    }
)
"""Functions that compute a step's denoise mask pixel by pixel."""


def is_known_guidance(function: Any) -> bool:
    """Whether a function is in PIXEL_WISE_GUIDANCE or WHOLE_GUIDANCE, and the function that it calls (OPERATION) is
    known."""
    name = name_of(function)
    if name in OPERATION and name_of(inspect.getclosurevars(function).nonlocals[OPERATION[name]]) not in OPERATIONS:
        return False
    return name in PIXEL_WISE_GUIDANCE or name in WHOLE_GUIDANCE


def looks_at_the_whole(function: Any) -> bool:
    """Whether a function needs the whole latent, given the present values of its closure."""
    name = name_of(function)
    if name in PIXEL_WISE_AT_ZERO and not inspect.getclosurevars(function).nonlocals[PIXEL_WISE_AT_ZERO[name]]:
        return False
    return name in WHOLE_GUIDANCE
