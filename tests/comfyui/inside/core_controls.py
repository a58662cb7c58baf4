"""Small networks of ComfyUI's own ControlNets, as its loaders give them."""

from typing import Any

from boot import comfy, torch
from controlnet import qwen, randomise

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


def of_qwen(config: dict[str, Any], is_inpainting: bool) -> comfy.controlnet.ControlNet:
    """InstantX's for a Qwen-Image of these arguments."""
    network = randomise(qwen(config, of_mask=4 * is_inpainting), seed=6)
    cpu = torch.device("cpu")
    format = comfy.latent_formats.Wan21()
    return comfy.controlnet.ControlNet(
        network, compression_ratio=1, latent_format=format, concat_mask=is_inpainting, load_device=cpu, extra_conds=[]
    )


def patcher(network: torch.nn.Module) -> comfy.model_patcher.ModelPatcher:
    cpu = torch.device("cpu")
    network = randomise(network, seed=6).requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(network, load_device=cpu, offload_device=cpu)
