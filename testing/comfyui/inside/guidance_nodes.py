"""Nodes of ComfyUI that change guidance, each as a function that puts it on a MODEL, and guiders."""

import importlib
from collections.abc import Callable

from boot import comfy, node, torch

STEPS = 5


def core(module: str, name: str, *arguments) -> Callable:
    """Puts a node of ComfyUI on a MODEL, in front of `arguments`."""

    def put(*model):
        kind = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        made = (kind.execute if hasattr(kind, "execute") else getattr(kind(), kind.FUNCTION))(*model, *arguments)
        return getattr(made, "args", made)[0]

    return put


def filtered(operation: str, *arguments) -> Callable:
    """Puts Latent Apply Operation CFG on a MODEL."""
    importlib.import_module("comfy_extras.nodes_post_processing")  # nodes_latent imports it in a circle
    operation = core("nodes_latent", operation, *arguments)
    return lambda model: core("nodes_latent", "LatentApplyOperationCFG", operation())(model)


def perp_neg(model):
    return core("nodes_perpneg", "PerpNeg", node("QuickstartPrompt", "7"), 0.8)(model)


class AudioVAE:
    """The part of an audio VAE that LTXV Reference Audio needs."""

    audio_sample_rate = 8

    def encode(self, waveform: torch.Tensor) -> torch.Tensor:
        return waveform.new_zeros(1, 8, 4, 16)


AUDIO = {"waveform": torch.zeros(1, 2, 8), "sample_rate": 8}
PIXEL_WISE = {
    "CFGNorm": core("nodes_cfg", "CFGNorm", 0.8),
    "CFGNorm before": core("nodes_cfg", "CFGNorm", 0.8, True),
    "CFG Override": core("nodes_custom_sampler", "CFGOverride", 1.5, 0.0, 0.6),
    "Epsilon Scaling": core("nodes_eps", "EpsilonScaling", 1.05),
    "LTXV Modality Guidance": core("nodes_lt", "LTXVModalityGuidance", 3.0, 0.0, 0.6),
    "LTXV Reference Audio": core("nodes_lt", "LTXVReferenceAudio", [], [], AUDIO, AudioVAE(), 2.0, 0.2, 1.0),
    "LTXV STG": core("nodes_lt", "LTXVSpatioTemporalGuidance", 1.5, "1", 0.2, 1.0),
    "Temporal Score Rescaling": core("nodes_eps", "TemporalScoreRescaling", 0.9, 0.8),
    "Perturbed Attention": core("nodes_pag", "PerturbedAttentionGuidance", 2.0),
    "Skip Layers simple": core("nodes_slg", "SkipLayerGuidanceDiTSimple", 0.2, 0.7, "", "2"),
    "Video Linear CFG": core("nodes_video_model", "VideoLinearCFGGuidance", 1.0),
    "Video Triangle CFG": core("nodes_video_model", "VideoTriangleCFGGuidance", 1.0),
}
WHOLE = {
    "APG": core("nodes_apg", "APG", 0.5, 4.0, -0.5),
    "CFG-Zero*": core("nodes_cfg", "CFGZeroStar"),
    "FreSca": core("nodes_fresca", "FreSca", 0.9, 1.4, 3),
    "Latent Sharpen": filtered("LatentOperationSharpen", 2, 1.0, 0.3),
    "Latent Tonemap": filtered("LatentOperationTonemapReinhard", 0.7),
    "Mahiro": core("nodes_mahiro", "Mahiro"),
    "Perp-Neg": perp_neg,
    "RenormCFG": core("nodes_lumina2", "RenormCFG", 100.0, 0.9),
    "RescaleCFG": core("nodes_model_advanced", "RescaleCFG", 0.7),
    "Skip Layers rescaled": core("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "", "2", 0.7),
    "TCFG": core("nodes_tcfg", "TCFG"),
}


def guider_of(model, name: str, texts: tuple[str, ...] = ("3 1 4 1", "", "7"), cfg: float = 3.0):
    """A guider of that name with its conditioning set: a prompt, the negative one, and what Perp-Neg calls the empty one."""
    texts = [node("QuickstartPrompt", text) for text in texts]
    if name == "PerpNegGuider":
        return core("nodes_perpneg", name, *texts, cfg, 0.8)(model)
    made = comfy.samplers.CFGGuider(model)
    made.set_conds(*texts[:2])
    made.set_cfg(cfg)
    return made


def times(steps: int = STEPS) -> torch.Tensor:
    return torch.linspace(1, 0, steps + 1) * 0.95
