"""Classes that no family computes, small, on ranks against ComfyUI's own MODEL of the same file. Run by serve.py."""

import math
import pkgutil
from functools import partial

from boot import BASE, Results, comfy, difference, ksampler, node, parallel, parts_of, sequence, sharing_small_lists, torch
from families import detecting
from safetensors.torch import load_file, save_file

MODELS = BASE / "models" / "diffusion_models"
TEXT = 32
RADIANCE = {
    "in_channels": 3, "out_channels": 64, "context_in_dim": TEXT, "hidden_size": 96, "mlp_ratio": 2.0, "num_heads": 4,
    "depth": 2, "depth_single_blocks": 3, "axes_dim": [8, 8, 8], "theta": 10000, "patch_size": 4, "qkv_bias": True,
    "in_dim": 64, "out_dim": 96, "hidden_dim": 64, "n_layers": 2, "txt_ids_dims": [], "vec_in_dim": None,
    "nerf_hidden_size": 8, "nerf_mlp_ratio": 1, "nerf_depth": 2, "nerf_max_freqs": 8, "nerf_tile_size": 0,
    "nerf_final_head_type": "conv", "nerf_embedder_dtype": None, "use_x0": False, "use_sequential_txt_ids": False,
}  # fmt: skip
OMNIGEN = {
    "hidden_size": 96, "num_attention_heads": 4, "num_kv_heads": 2, "num_layers": 4, "num_refiner_layers": 2,
    "multiple_of": 32, "axes_dim_rope": [8, 8, 8], "axes_lens": [64, 64, 64], "timestep_scale": 1000.0,
}  # fmt: skip
WAN = {
    "image_model": "wan2.1", "dim": 96, "ffn_dim": 64, "freq_dim": 32, "text_dim": TEXT, "num_heads": 4, "num_layers": 4,
}  # fmt: skip
LATENT, PIXELS = (1, 16, 16, 24), (1, 3, 32, 48)
CLASSES = {
    "omnigen2": ("omnigen.omnigen2.OmniGen2Transformer2DModel", OMNIGEN | {"text_feat_dim": TEXT}, LATENT),
    "boogu": (
        "boogu.model.BooguTransformer2DModel",
        OMNIGEN | {"instruction_feat_dim": TEXT, "num_double_stream_layers": 2},
        LATENT,
    ),
    "lens": (
        "lens.model.LensTransformer2DModel",
        {"num_layers": 4, "attention_head_dim": 24, "num_attention_heads": 4, "enc_hidden_dim": TEXT // 2,
         "axes_dims_rope": [8, 8, 8], "selected_layer_index": [5, 11]},
        (1, 128, 8, 12),
    ),
    "mage_flow": (
        "mage_flow.model.MageFlowTransformer2DModel",
        {"num_layers": 4, "attention_head_dim": 24, "num_attention_heads": 4, "joint_attention_dim": TEXT,
         "axes_dims_rope": [8, 8, 8]},
        (1, 128, 8, 12),
    ),
    "joyimage": (
        "joyimage.model.JoyImageTransformer3DModel",
        {"hidden_size": 256, "num_attention_heads": 2, "text_dim": TEXT, "num_layers": 4, "rope_dim_list": [16, 56, 56]},
        (1, 16, 1, 16, 24),
    ),
    "pixeldit_t2i": (
        "pixeldit.model.PixDiT_T2I",
        {"num_groups": 4, "hidden_size": 96, "pixel_attn_hidden_size": 64, "pixel_num_groups": 4, "patch_depth": 3,
         "patch_size": 4, "txt_embed_dim": TEXT, "txt_max_length": 40},
        PIXELS,
    ),
    "chroma_radiance": ("chroma_radiance.model.ChromaRadiance", RADIANCE, PIXELS),
    "mochi_preview": (
        "genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
        {"in_channels": 12, "hidden_size_x": 96, "hidden_size_y": 48, "depth": 3, "num_heads": 4, "mlp_ratio_x": 128.0,
         "qk_norm": True, "qkv_bias": False, "out_bias": True, "use_t5": True, "t5_feat_dim": TEXT, "t5_token_length": 9,
         "use_extended_posenc": False, "posenc_preserve_area": True, "timestep_mlp_bias": True, "attn_drop": 0.0,
         "patch_embed_bias": True, "learn_sigma": False},
        (1, 12, 2, 16, 24),
    ),
    "wan_s2v": (
        "wan.model.WanModel_S2V",
        WAN | {"model_type": "s2v", "audio_dim": 32, "audio_inject_layers": [0, 2]},
        (1, 16, 3, 16, 24),
    ),
    "wan_humo": (
        "wan.model.HumoWanModel",
        WAN | {"model_type": "humo", "dim": 1536, "ffn_dim": 64, "num_heads": 12},
        (1, 16, 3, 16, 24),
    ),
    "wan_dancer": (
        "wan.model_wandancer.WanDancerModel",
        WAN | {"model_type": "wandancer", "in_dim": 36, "audio_inject_layers": [0, 2], "music_dim": 32,
               "music_latent_dim": 32},
        (1, 16, 3, 16, 24),
    ),
    "zimage_pixel": (
        "lumina.model.NextDiTPixelSpace",
        {"patch_size": 4, "in_channels": 3, "dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "multiple_of": 32,
         "ffn_dim_multiplier": 1.0, "norm_eps": 1e-5, "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [16, 24, 24],
         "axes_lens": [64, 64, 64], "rope_theta": 256.0, "z_image_modulation": True, "time_scale": 1000.0,
         "pad_tokens_multiple": 8, "decoder_hidden_size": 48, "decoder_num_res_blocks": 2, "decoder_max_freqs": 4,
         "decoder_in_channels": 48},
        PIXELS,
    ),
}  # fmt: skip
"""ComfyUI's name of a model -> its class below comfy.ldm, the class's arguments, and a latent's shape."""
UNET = {
    "image_size": 32, "use_spatial_transformer": True, "legacy": False, "in_channels": 4, "out_channels": 4,
    "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1, "context_dim": TEXT,
    "use_temporal_attention": False,
}  # fmt: skip
UNETS = {
    "SD15": UNET | {"adm_in_channels": None, "use_linear_in_transformer": False, "num_heads": 4, "num_head_channels": -1},
    "SDXL": UNET | {"adm_in_channels": 2816, "use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 64,
                    "model_channels": 64, "num_classes": "sequential"},
}  # fmt: skip
"""Class of supported_models -> arguments of its UNet."""
UNET_MORE = {"pooled_output": (1, 1280)}
MATCHED = "model_channels", "context_dim", "adm_in_channels", "use_linear_in_transformer", "use_temporal_attention"
"""Those by which ComfyUI tells UNets apart."""
MORE = {
    "wan_s2v": {"audio_embed": (1, 25, 32, 12)},
    "wan_humo": {"audio_embed": (1, 3, 8, 5, 1280)},
    "wan_dancer": {"audio_embed": (1, 9, 35)},
}
"""Shapes of conditioning with which a class runs once more."""
MODES = {
    "one rank": {"pipe": 1, "devices": "cpu"},
    "stages": {"pipe": 2},
    "split batch": {"pipe": 1, "batch": 2},
    "tensor": {"pipe": 1, "tensor": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "ring": {"pipe": 1, "config": sequence(ring=2)},
    "ulysses and stages": {"pipe": 2, "devices": "cpu,cpu,cpu,cpu", "config": sequence(ulysses=2)},
}


def write(kind: type[torch.nn.Module], arguments: dict, name: str) -> None:
    """A file of random values, with gates that are not 0."""
    model, g = (
        kind(**arguments, operations=comfy.ops.disable_weight_init, dtype=torch.float32),
        torch.Generator().manual_seed(5),
    )
    state = {}
    for key, value in model.state_dict().items():
        std = 1 / math.sqrt(value[0].numel()) if value.ndim > 1 else 0.1
        state[key] = std * torch.randn(value.shape, generator=g) + (1.0 if value.ndim == 1 and "weight" in key else 0.0)
    save_file(state, MODELS / name)


def main(results: Results, names: list[str]) -> None:
    for name in names:
        if name in UNETS:
            unet(results, name)
            continue
        place, arguments, shape = CLASSES[name]
        write(pkgutil.resolve_name(f"comfy.ldm.{place}"), arguments, f"{name}.safetensors")
        with detecting({"image_model": name} | arguments), sharing_small_lists():
            sampled_in_every_mode(results, name, shape, {})
            if name in MORE:
                sampled_in_every_mode(results, name, shape, MORE[name])


def unet(results: Results, name: str) -> None:
    kind, arguments = "modules.diffusionmodules.openaimodel.UNetModel", UNETS[name]
    write(pkgutil.resolve_name(f"comfy.ldm.{kind}"), arguments, f"{name}.safetensors")
    matched = {entry: arguments[entry] for entry in MATCHED}
    with detecting(arguments | {"values": {f"comfy.supported_models.{name}.unet_config": matched}}):
        sampled_in_every_mode(results, name, (1, 4, 16, 24), UNET_MORE)
        with_lora(results, name)


def with_lora(results: Results, name: str) -> None:
    """A LoRA of a UNet's linear layers and convolutions."""
    g, file, prompts = torch.Generator().manual_seed(3), f"{name}.safetensors", conditioning(UNET_MORE)
    native = comfy.sd.load_diffusion_model(str(MODELS / file), model_options={"dtype": torch.float32})
    lora = {}
    for key, value in list(native.model.diffusion_model.state_dict().items()):
        if key.endswith("weight") and value.ndim > 1 and ("attn" in key or "layers" in key or "skip" in key):
            out, into, *kernel = value.shape
            ones = [1] * len(kernel)
            layer = f"diffusion_model.{key.removesuffix('.weight')}"
            lora[f"{layer}.lora_up.weight"] = 0.3 * torch.randn(out, 4, *ones, generator=g)
            down = torch.randn(4, into, *kernel, generator=g)
            lora[f"{layer}.lora_down.weight"] = down / math.sqrt(down[0].numel())

    def sampled(model, lora: dict) -> torch.Tensor:
        patched = comfy.sd.load_lora_for_models(model, None, dict(lora), 0.7, 0.0)[0] if lora else model
        return ksampler(patched, prompts, torch.zeros(1, 4, 16, 24), steps=3)

    def case(model) -> dict[str, float]:
        plain, expected = sampled(native, {}), sampled(native, lora)
        largest = float(expected.abs().max())
        moved = difference(plain, expected) / largest
        return {"share": difference(expected, sampled(model, lora)) / largest, "moved": moved}

    def whole_file() -> float:
        """A file with an encoder and a VAE too, as most UNets come."""
        state = {f"model.diffusion_model.{key}": value for key, value in load_file(MODELS / file).items()}
        others = {
            "first_stage_model.decoder.conv_in.weight": torch.zeros(4, 4, 3, 3),
            "cond_stage_model.logit_scale": torch.ones(1),
        }
        save_file(state | others, MODELS / f"whole-{file}")
        expected = sampled(native, {})
        found = sampled(parallel(f"whole-{file}", pipe=1, batch=2), {})
        return difference(expected, found) / float(expected.abs().max())

    results.case(f"{name}, all-in-one file", whole_file)
    results.case(f"{name}, LoRA", lambda: case(parallel(file, pipe=1, batch=2)))
    results.case(f"{name}, Parallelize Model", lambda: case(node("ParallelizeModel", native, 2, "auto")))


def conditioning(more: dict[str, tuple[int, ...]]) -> list:
    """Positive and negative."""
    g = torch.Generator().manual_seed(0)
    texts = [torch.randn(1, 9, TEXT, generator=g) for _ in range(2)]
    others = {entry: torch.randn(shape, generator=g) for entry, shape in more.items()}
    return [[[text, {"attention_mask": torch.ones(1, 9, dtype=torch.long)} | others]] for text in texts]


def sampled_in_every_mode(results: Results, name: str, shape: tuple[int, ...], more: dict[str, tuple[int, ...]]) -> None:
    file, prompts, latent = f"{name}.safetensors", conditioning(more), torch.zeros(shape)
    native = comfy.sd.load_diffusion_model(str(MODELS / file), model_options={"dtype": torch.float32})
    expected = ksampler(native, prompts, latent, steps=3)
    largest = max(float(part.abs().max()) for part in parts_of(expected))

    def compare(degrees: dict) -> float:
        return difference(expected, ksampler(parallel(file, **degrees), prompts, latent, steps=3)) / largest

    def in_patches(warmup_steps: int) -> float:
        model = node("ApplyPipeFusion", parallel(file), 2, warmup_steps, True)
        return difference(expected, ksampler(model, prompts, latent, steps=3)) / largest

    for mode, degrees in MODES.items():
        results.case(", ".join((name, *more, mode)), partial(compare, degrees))
    for mode, warmup_steps in (("PipeFusion with all steps exact", 1000), ("PipeFusion with one exact step", 1)):
        results.case(", ".join((name, *more, mode)), partial(in_patches, warmup_steps))
