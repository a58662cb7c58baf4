"""A small network of ComfyUI's own Fun ControlNet of MiniMax H3, as ModelPatchLoader gives it."""

from typing import Any

from boot import comfy, torch
from controlnet import randomise

KEPT = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}


def of_h3(config: dict[str, Any]) -> Any:
    """For a MiniMax H3 of three blocks with these arguments. None: this ComfyUI (before 0.38) has no such control."""
    try:
        from comfy.ldm.minimax.controlnet import MiniMaxH3FunControl
    except ImportError:
        return None
    names = ("hidden_size", "num_attention_heads", "attention_head_dim", "ffn_hidden_size", "time_embed_dim")
    curves = "adaln_curve_grid" in config
    sizes = {each: config[each] for each in names}
    return patcher(MiniMaxH3FunControl(49, (0, 2), **sizes, use_adaln_curves=curves, **KEPT))


def patcher(network: torch.nn.Module) -> comfy.model_patcher.ModelPatcher:
    cpu = torch.device("cpu")
    network = randomise(network, seed=6).requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(network, load_device=cpu, offload_device=cpu)
