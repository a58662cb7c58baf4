"""Nodes and guiders of other packs that change guidance, as guidance_nodes.py has ComfyUI's."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import guidance_nodes
from boot import load_pack, node, nodes, torch
from server import PromptServer

PACKS = (
    *("Skimmed_CFG", "sd-dynamic-thresholding", "ComfyUI_essentials", "ComfyUI-KJNodes", "ComfyUI-Inspire-Pack"),
    "ComfyUI-bleh",
)
"""Folders that the packs' repositories are cloned to."""


def of_pack(name: str, *arguments) -> Callable:
    """Puts a pack's node on a MODEL."""

    def put(model):
        kind = nodes.NODE_CLASS_MAPPINGS[name]
        return getattr(kind(), kind.FUNCTION)(model, *arguments)[0]

    return put


def regional(model):
    """Inspire's Regional CFG with a mask whose rows differ."""
    return of_pack("RegionalCFG //Inspire", torch.linspace(0, 1, 64 * 64).reshape(1, 64, 64))(model)


PIXEL_WISE = {
    "Skimmed CFG": of_pack("Skimmed CFG", 5.0, False, False),
    "Skimmed CFG replace": of_pack("Skimmed CFG - replace"),
    "Skimmed CFG linear": of_pack("Skimmed CFG - linear interpolation", 4.0),
    "Skimmed CFG dual": of_pack("Skimmed CFG - linear interpolation dual scales", 4.0, 2.0),
    "Skimmed CFG flip": of_pack("Skimmed CFG - Timed flip", 0.3, False),
    "Guidance Timestepping": of_pack("GuidanceTimestepping+", 2.0, 0.2, 0.8),
}
WHOLE = {
    "Difference CFG": of_pack("Skimmed CFG - Difference CFG", 2.0, "linear_distance", 0.9),
    "Difference CFG sum": of_pack("Skimmed CFG - Difference CFG", 2.0, "absolute_sum", 0.9),
    "Dynamic Thresholding": of_pack("DynamicThresholdingSimple", 2.0, 0.95),
    "Dynamic Thresholding full": of_pack(
        "DynamicThresholdingFull",
        *(2.0, 0.95, "Half Cosine Down", 1.0, "Half Cosine Up", 1.0, 1.0, "enable", "MEAN", "STD", 0.9),
    ),
    "CFG-Zero* (KJ)": of_pack("CFGZeroStarAndInit", True, 0),
    "Regional CFG": regional,
    "Contrastive CFG": lambda model: nodes.NODE_CLASS_MAPPINGS["BlehContrastiveOrthoCFG"].go(
        model=model, start_dim=1, end_dim=-1
    )[0],
    "Contrastive CFG after": lambda model: nodes.NODE_CLASS_MAPPINGS["BlehContrastiveOrthoCFG"].go(
        model=model, patch_mode="post_cfg", start_dim=1, end_dim=-1
    )[0],
}


def guider_of(model, name: str, steps: int, texts: tuple[str, ...], cfg: float):
    """As guidance_nodes.guider_of, with the packs' guiders."""
    encoded = [node("QuickstartPrompt", text) for text in texts]
    if name == "ScheduledCFGGuidance":  # KJNodes
        return nodes.NODE_CLASS_MAPPINGS[name]().get_guider(model, cfg, *encoded[:2], 0.0, 0.5)[0]
    if name.startswith("Scheduled"):  # Inspire
        kind = nodes.NODE_CLASS_MAPPINGS[f"{name} //Inspire"]()
        prompts = (*encoded, 0.8) if "PerpNeg" in name else encoded[:2]
        return kind.get_guider(model, *prompts, guidance_nodes.times(steps), cfg + 1, cfg - 1, "linear")[0]
    return guidance_nodes.guider_of(model, name, texts, cfg)


def load_packs(folder: Path, names: tuple[str, ...] = PACKS) -> None:
    PromptServer(asyncio.new_event_loop())  # packs add routes to it
    for pack in names:
        load_pack(folder / pack)
