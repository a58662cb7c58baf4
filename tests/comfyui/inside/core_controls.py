"""Small networks of ComfyUI's own Fun ControlNets of MiniMax H3 and Qwen-Image 2.1, as ModelPatchLoader gives them."""

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


def of_qwen21(config: dict[str, Any]) -> Any:
    """For a Qwen-Image 2.1 of an even number of blocks with these arguments. None: this ComfyUI has no such control."""
    try:
        from comfy.ldm.qwen_image21.model import QwenImage21FunControl
    except ImportError:
        return None
    head = config["attention_head_dim"]
    channels, width = 2 * config["in_channels"] + 1, config["num_attention_heads"] * head
    return patcher(QwenImage21FunControl(2, channels, width, head, fused_mlp=True, **KEPT))


def patcher(network: torch.nn.Module) -> comfy.model_patcher.ModelPatcher:
    cpu = torch.device("cpu")
    network = randomise(network, seed=6).requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(network, load_device=cpu, offload_device=cpu)
