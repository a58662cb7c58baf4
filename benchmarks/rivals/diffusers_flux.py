"""diffusers' Flux for the others: a folder with the weights of a file of the mini class, and its forward in this process.

Names of tensors: black-forest-labs/flux has those of the file, diffusers' transformer_flux.py those of the folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import save_file

STREAMS = {"img": ("attn.to_{}", "to_out.0", "norm_{}", "ff", "norm1"), "txt": (
    "attn.add_{}_proj", "to_add_out", "norm_added_{}", "ff_context", "norm1_context")}  # fmt: skip
PATCH = 2


def config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The class's arguments as diffusers has them."""
    head = sum(arguments["axes"])
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": 16 * PATCH**2,
        "num_layers": arguments["double_blocks"],
        "num_single_layers": arguments["single_blocks"],
        "attention_head_dim": head,
        "num_attention_heads": arguments["width"] // head,
        "joint_attention_dim": arguments["context_width"],
        "pooled_projection_dim": arguments["pooled_width"],
        "guidance_embeds": arguments["guidance"],
        "axes_dims_rope": list(arguments["axes"]),
    }


def save_folder(file: Path, arguments: Mapping[str, Any], folder: Path) -> Path:
    """The file's weights as diffusers saves them, a block a file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(arguments)))
    index = {}
    with safe_open(file, "pt") as opened:
        parts: dict[str, list[str]] = {}
        for key in opened.keys():  # noqa: SIM118 (it is no mapping)
            parts.setdefault(".".join(key.split(".")[:2]) if "_blocks." in key else "", []).append(key)
        count = len(parts)
        for number, keys in enumerate(parts.values(), 1):
            tensors = {}
            for key in keys:
                tensors |= renamed(key, opened.get_tensor(key), arguments["width"])
            name = f"diffusion_pytorch_model-{number:05}-of-{count:05}.safetensors"
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
            index |= dict.fromkeys(tensors, name)
    stated = {"metadata": {"total_size": file.stat().st_size}, "weight_map": index}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(stated))
    return folder


def renamed(key: str, value: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """A tensor of the file under diffusers' names: a fused layer's by its parts."""
    layer, _, leaf = key.rpartition(".")
    top, _, rest = layer.partition(".")
    if top not in ("double_blocks", "single_blocks"):
        return _outside(layer, leaf, value)
    number, _, part = rest.partition(".")
    if top == "single_blocks":
        block = f"single_transformer_blocks.{number}"
        if part == "linear1":
            names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            pieces = value.split((width, width, width, len(value) - 3 * width))
            return {f"{block}.{name}.{leaf}": piece for name, piece in zip(names, pieces, strict=True)}
        name = {"linear2": "proj_out", "modulation.lin": "norm.linear"}.get(part) or f"attn.norm_{part.split('.')[1][0]}"
        return {f"{block}.{name}.{'weight' if leaf == 'scale' else leaf}": value}
    block, stream = f"transformer_blocks.{number}", part[:3]
    projections, out, norms, feed_forward, modulation = STREAMS[stream]
    what = part.partition("_")[2]
    if what == "attn.qkv":
        names = (projections.format(each) for each in ("q", "k", "v"))
        return {f"{block}.{name}.{leaf}": piece for name, piece in zip(names, value.chunk(3), strict=True)}
    if what.startswith("attn.norm."):
        return {f"{block}.attn.{norms.format(what.split('.')[2][0])}.weight": value}
    names = {"attn.proj": f"attn.{out}", "mlp.0": f"{feed_forward}.net.0.proj", "mlp.2": f"{feed_forward}.net.2"}
    return {f"{block}.{names.get(what, f'{modulation}.linear')}.{leaf}": value}


def _outside(layer: str, leaf: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    if layer == "final_layer.adaLN_modulation.1":  # shift and scale change places
        return {f"norm_out.linear.{leaf}": torch.cat(value.chunk(2)[::-1])}
    names = {"txt_in": "context_embedder", "img_in": "x_embedder", "final_layer.linear": "proj_out"}
    if layer in names:
        return {f"{names[layer]}.{leaf}": value}
    embedder, _, side = layer.partition(".")
    kinds = {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}
    number = {"in_layer": 1, "out_layer": 2}[side]
    return {f"time_text_embed.{kinds[embedder]}_embedder.linear_{number}.{leaf}": value}


def forward(
    model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """diffusers' forward on latents [B, 16, H, W], `timestep` [B] in 0..1, with `context` [B, T, c] and `pooled` [B, v]."""
    rows, columns = (side // PATCH for side in x.shape[-2:])
    down, across = (torch.arange(count, device=x.device).float() for count in (rows, columns))
    places = torch.cartesian_prod(torch.zeros(1, device=x.device), down, across)
    out = model(
        hidden_states=rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH),
        encoder_hidden_states=tensors["context"],
        pooled_projections=tensors["pooled"],
        timestep=timestep,
        img_ids=places,
        txt_ids=torch.zeros(tensors["context"].shape[1], 3, device=x.device),
        return_dict=False,
    )[0]
    return unpacked(out, rows)


def unpacked(tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Tokens [B, rows x columns, C] -> latents [B, 16, H, W]."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=PATCH, q=PATCH)
