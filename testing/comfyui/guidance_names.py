"""Names of inside/guidance_nodes.py by table, for processes that import nothing of ComfyUI."""

PIXEL_WISE = (
    *("CFGNorm", "CFGNorm before", "CFG Override", "Epsilon Scaling", "Temporal Score Rescaling", "Video Linear CFG"),
    *("Video Triangle CFG", "Perturbed Attention", "Skip Layers", "Skip Layers simple"),
    *("LTXV Modality Guidance", "LTXV Reference Audio", "LTXV STG"),
)
WHOLE = (
    *("APG", "CFG-Zero*", "FreSca", "Latent Sharpen", "Latent Tonemap", "Mahiro", "Perp-Neg", "RenormCFG", "RescaleCFG"),
    *("TCFG", "PerpNegGuider", "Skip Layers rescaled"),
)
PACKS_PIXEL_WISE = (
    *("Skimmed CFG", "Skimmed CFG replace", "Skimmed CFG linear", "Skimmed CFG dual", "Skimmed CFG flip"),
    *("Guidance Timestepping", "ScheduledCFGGuidance", "ScheduledCFGGuider"),
)
PACKS_WHOLE = (
    *("Difference CFG", "Difference CFG sum", "Dynamic Thresholding", "Dynamic Thresholding full", "CFG-Zero* (KJ)"),
    *("Regional CFG", "Contrastive CFG", "Contrastive CFG after", "ScheduledPerpNegCFGGuider"),
)
