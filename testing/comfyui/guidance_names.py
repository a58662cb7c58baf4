"""Names of inside/guidance_nodes.py by table, for processes that import nothing of ComfyUI."""

PIXEL_WISE = (
    *("CFGNorm", "CFGNorm before", "CFG Override", "Epsilon Scaling", "Temporal Score Rescaling", "Video Linear CFG"),
    *("Video Triangle CFG", "Perturbed Attention", "Skip Layers simple"),
    *("LTXV Modality Guidance", "LTXV Reference Audio", "LTXV STG"),
)
WHOLE = (
    *("APG", "CFG-Zero*", "FreSca", "Latent Sharpen", "Latent Tonemap", "Mahiro", "Perp-Neg", "RenormCFG", "RescaleCFG"),
    *("TCFG", "PerpNegGuider", "Skip Layers rescaled"),
)
