"""Files of ComfyUI's classes: the keys and shapes that its own model has at its usual width, and a hole for values."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import comfy.ops
import comfy.supported_models
from boot import torch

from testing.files import write_header

FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0,
    "num_heads": 24, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
CHROMA = {
    "in_channels": 64, "out_channels": 64, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24,
    "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True,
    "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5, "txt_ids_dims": [], "vec_in_dim": None,
}  # fmt: skip
HUNYUAN = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0,
    "num_heads": 24, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 256, "patch_size": [1, 2, 2],
    "qkv_bias": True, "byt5": False, "guidance_embed": True, "use_cond_type_embedding": False, "vision_in_dim": None,
    "meanflow": False, "meanflow_sum": False,
}  # fmt: skip
HUNYUAN_15 = HUNYUAN | {
    "in_channels": 65, "out_channels": 32, "vec_in_dim": None, "context_in_dim": 3584, "byt5": True, "depth": 2,
    "depth_single_blocks": 0, "hidden_size": 2048, "num_heads": 16, "vision_in_dim": 1152, "use_cond_type_embedding": True,
    "guidance_embed": False, "patch_size": [1, 1, 1],
}  # fmt: skip
COSMOS = {
    "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 2048, "num_blocks": 28, "num_heads": 16, "concat_padding_mask": True,
    "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "use_adaln_lora": True, "adaln_lora_dim": 256,
}  # fmt: skip
LUMINA = {"patch_size": 2, "in_channels": 16, "qk_norm": True}
ARGUMENTS = {  # beside the class's own unet_config; others are built with the defaults of ComfyUI's model
    "Flux": FLUX,
    "FluxInpaint": FLUX | {"in_channels": 96},
    "FluxSchnell": FLUX | {"guidance_embed": False},
    "LongCatImage": FLUX | {"guidance_embed": False, "vec_in_dim": None, "context_in_dim": 3584, "txt_ids_dims": [1, 2]},
    "Flux2": FLUX | {
        "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 15360, "hidden_size": 6144,
        "mlp_ratio": 3.0, "num_heads": 48, "depth": 2, "depth_single_blocks": 2, "axes_dim": [32, 32, 32, 32],
        "theta": 2000, "patch_size": 1, "qkv_bias": False, "global_modulation": True, "mlp_silu_act": True,
        "ops_bias": False, "txt_ids_dims": [3],
    },
    "Chroma": CHROMA,
    "ChromaRadiance": CHROMA | {
        "in_channels": 3, "patch_size": 16, "nerf_hidden_size": 64, "nerf_mlp_ratio": 4, "nerf_depth": 4,
        "nerf_max_freqs": 8, "nerf_tile_size": 512, "nerf_final_head_type": "conv", "nerf_embedder_dtype": None,
        "use_x0": False, "use_sequential_txt_ids": False,
    },
    "HunyuanVideo": HUNYUAN,
    "HunyuanVideoI2V": HUNYUAN | {"in_channels": 33},
    "HunyuanVideoSkyreelsI2V": HUNYUAN | {"in_channels": 32},
    "HunyuanVideo15": HUNYUAN_15,
    "HunyuanVideo15_SR_Distilled": HUNYUAN_15 | {"in_channels": 98},
    "HunyuanImage21": HUNYUAN | {
        "in_channels": 64, "out_channels": 64, "vec_in_dim": None, "context_in_dim": 3584, "byt5": True,
        "hidden_size": 3584, "num_heads": 28, "patch_size": [1, 1], "axes_dim": [64, 64], "guidance_embed": False,
    },
    "HunyuanImage21Refiner": HUNYUAN | {
        "in_channels": 128, "out_channels": 64, "vec_in_dim": None, "context_in_dim": 3584, "hidden_size": 3328,
        "num_heads": 26, "patch_size": [1, 1, 1],
    },
    "CosmosT2V": COSMOS | {"model_channels": 4096, "num_heads": 32},
    "CosmosI2V": COSMOS | {"model_channels": 4096, "num_heads": 32, "in_channels": 17},
    "CosmosT2IPredict2": COSMOS,
    "CosmosI2VPredict2": COSMOS | {"in_channels": 17},
    "Anima": COSMOS,
    "ZImage": LUMINA | {
        "dim": 3840, "cap_feat_dim": 2560, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True,
        "time_scale": 1000.0, "pad_tokens_multiple": 32,
    },
    "Lumina2": LUMINA | {
        "dim": 2304, "cap_feat_dim": 2304, "n_layers": 26, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32],
        "axes_lens": [300, 512, 512], "ffn_dim_multiplier": 4.0,
    },
    "HiDream": {
        "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 16, "num_single_layers": 32,
        "attention_head_dim": 128, "num_attention_heads": 20, "caption_channels": [4096, 4096], "text_emb_dim": 2048,
        "num_routed_experts": 4, "num_activated_experts": 2, "axes_dims_rope": (64, 32, 32), "max_resolution": (128, 128),
        "llama_layers": [*range(32), *[31] * 16],
    },
    "SeedVR2": {
        "vid_dim": 2560, "heads": 20, "num_layers": 32, "norm_eps": 1e-5, "mlp_type": "swiglu", "vid_out_norm": True,
    },
    "GenmoMochi": {
        "depth": 48, "patch_size": 2, "num_heads": 24, "hidden_size_x": 3072, "hidden_size_y": 1536, "mlp_ratio_x": 4.0,
        "mlp_ratio_y": 4.0, "in_channels": 12, "qk_norm": True, "qkv_bias": False, "t5_feat_dim": 4096,
        "t5_token_length": 256, "use_t5": True, "learn_sigma": False,
    },
    "Trellis2": {"resolution": 64},
    "WAN21_Vace": {"vace_layers": 8, "vace_in_dim": 96},
    "WAN22_Animate": {"num_layers": 5},
    "WAN_Animate2": {"num_layers": 2},
    "WAN22_WanDancer": {"num_layers": 2},
    "QwenImage": {"num_layers": 2},
    "QwenImage21": {"num_layers": 2},
    "Kandinsky5Image": {"axes_dims": [32, 48, 48]},
    "Krea2": {"layers": 2},
    "LTXAV": {"num_layers": 2},
    "MiniMaxH3": {"num_layers": 2},
    "SD3": {
        "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 24, "input_size": None, "adm_in_channels": 2048,
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
        "num_patches": 36864, "pos_embed_max_size": 192, "pos_embed_scaling_factor": None,
    },
    "WAN22_T2V": {"in_dim": 48},
    "HunyuanDiT1": {"size_cond": True, "use_style_cond": True, "hidden_size": 1408, "depth": 2},
    "PixArtAlpha": {"depth": 2},
    "PixArtSigma": {"depth": 2, "input_size": 128, "model_max_length": 300, "micro_condition": False},
}  # fmt: skip
HEADERS = {  # what tells a file of the class apart from plain Wan, and what an LTX-2 file has to say
    "LTXAV": {"rope_type": "split", "causal_temporal_positioning": True, "use_middle_indices_grid": True},
    "WAN_Animate2": {"model_type": "animate2"},
    "WAN21_FlowRVS": {"model_type": "flow_rvs"},
    "WAN21_CausalAR_T2V": {"causal_ar": True},
}
COMPUTED = ("PixArtAlpha", "PixArtSigma")
"""Classes whose constructor computes with values."""
UNET = ("input_blocks.0.0.weight", "input_blocks.0.0.bias", "time_embed.0.weight", "out.2.weight")
KEYS = {  # classes that take long to build or cannot be built without values: some of their keys
    "Stable_Cascade_C": ("clip_txt_mapper.weight", "clf.1.weight"),
    "Stable_Cascade_B": ("clip_mapper.weight", "effnet_mapper.0.weight"),
    "StableAudio": ("transformer.rotary_pos_emb.inv_freq", "to_cond_embed.0.weight"),
    "StableAudio3": ("transformer.rotary_pos_emb.inv_freq", "to_timestep_embed.0.weight"),
    "ACEStep15": ("encoder.lyric_encoder.layers.0.input_layernorm.weight", "decoder.proj_in.1.weight"),
    "RT_DETR_v4": ("encoder.pan_blocks.1.cv4.conv.weight",),
}


def write_hole(path: Path, shapes: dict[str, tuple[int, ...]], transformer: dict) -> None:
    """A safetensors file in bf16 whose values are a hole."""
    write_header(path, shapes, {"config": json.dumps({"transformer": transformer})} if transformer else {})


def native_shapes(kind: type, arguments: Mapping[str, Any] = MappingProxyType({})) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of ComfyUI's own model of this class. `arguments`: others than those of ARGUMENTS."""
    name = kind.__name__
    if name in KEYS:
        return dict.fromkeys(KEYS[name], (1, 1))
    if name not in ARGUMENTS and issubclass(kind, UNETS):
        return dict.fromkeys(UNET, (1, 1))
    config = kind({**kind.unet_config, **ARGUMENTS.get(name, {}), **arguments})
    config.unet_config |= kind.unet_extra_config
    config.custom_operations = comfy.ops.disable_weight_init
    with torch.device("cpu" if name in COMPUTED else "meta"):
        model = config.get_model({}, "", device=None if name in COMPUTED else torch.device("meta"))
    return {key: tuple(value.shape) for key, value in model.diffusion_model.state_dict().items()}


UNETS = tuple(
    getattr(comfy.supported_models, name)
    for name in ("SD15", "SD20", "SDXLRefiner", "SDXL", "SVD_img2vid", "Stable_Zero123")
)
