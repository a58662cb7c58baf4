"""What nodes need beside their widgets' defaults: where these do nothing, or nothing to a model as small as these.

Node -> "inputs" (a value, or {"link": a type or a name}), "nodes" that these links name, "settings" of the sampling (steps,
cfg, latent), "floats" (the value of every FLOAT widget), and inputs and settings by the first word of a model.
"""

HALF = {"floats": 0.5}
CACHE = {"inputs": {"reuse_threshold": 3.0, "start_percent": 0.0}, "settings": {"steps": 8}}
LAYERS = {"double_layers": "0,1", "single_layers": "0,1", "start_percent": 0.0, "end_percent": 1.0}
MERGES = (
    *("Simple", "Blocks", "SD1", "SD2", "SDXL", "SD3_2B", "Auraflow", "Flux1", "SD35_Large", "MochiPreview", "LTXV"),
    *("Cosmos7B", "Cosmos14B", "WAN2_1", "CosmosPredict2_2B", "CosmosPredict2_14B", "QwenImage", "Krea2"),
)
COMFYUI = {f"ModelMerge{name}": HALF for name in MERGES} | {
    "ARVideoI2V": {"inputs": {"width": 64, "height": 64, "length": 9}},
    "ModelMergeAdd": {"inputs": {"model2": {"link": "difference"}}, "nodes": {"difference": ["ModelMergeSubtract", {}]}},
    "ContextWindowsManual": {
        "inputs": {"context_length": 8, "context_overlap": 2, "dim": 2},
        "wan": {"inputs": {"context_length": 3, "context_overlap": 1}},
    },
    "WanContextWindowsManual": {"inputs": {"context_length": 9, "context_overlap": 4}},
    "LTXVContextWindows": {"inputs": {"context_length": 17, "context_overlap": 8}},
    "DifferentialDiffusion": {"settings": {"latent": "masked"}},
    "DualModelGuider": {"inputs": {"negative": {"link": "CONDITIONING"}}},
    "EasyCache": CACHE,
    "LazyCache": CACHE,
    "FreSca": {"inputs": {"freq_cutoff": 3}},
    "ModelComputeDtype": {"inputs": {"dtype": "bf16"}},
    "KSamplerSelect": {"inputs": {"sampler_name": "dpmpp_2m_sde"}},
    "ModelSamplingSD3": {"inputs": {"shift": 5.0}},
    "ModelSamplingFlux": {"inputs": {"max_shift": 2.0}},
    "ScaleROPE": {"inputs": {"scale_x": 1.5, "scale_y": 1.5, "shift_x": 2.0}, "wan": {"inputs": {"scale_t": 1.5}}},
    "SkipLayerGuidanceDiT": {"inputs": LAYERS},
    "SkipLayerGuidanceDiTSimple": {"inputs": LAYERS},
    "SkipLayerGuidanceSD3": {"inputs": {"layers": "0, 1", "start_percent": 0.0, "end_percent": 1.0}},
}
FIRST_BLOCKS = {"blocks": "1", "start_percent": 0.0}
KJNODES = {
    "HunyuanVideoEncodeKeyframesToCond": {"inputs": {"num_frames": 5}},
    "LatentInpaintTTM": {"inputs": {"mask": {"link": "MASK"}}},
    "PathchSageAttentionKJ": {"inputs": {"sage_attention": "disabled"}},
    "SkipLayerGuidanceWanVideo": {"inputs": FIRST_BLOCKS},
    "WanVideoTeaCacheKJ": {
        "inputs": {"rel_l1_thresh": 10.0, "start_percent": 0.0, "coefficients": "disabled"},
        "settings": {"steps": 8},
    },
}
TILES = {"tile_width": 64, "tile_height": 64}
UPSCALING = {"inputs": TILES | {"upscale_by": 1.0, "tile_padding": 16}}
OTHERS = {
    "ApplyFBCacheOnModel": {"inputs": {"residual_diff_threshold": 1.0, "end": 1.0}, "settings": {"steps": 8}},
    "TiledDiffusion": {"inputs": TILES | {"tile_overlap": 32}},
    "BlehModelPatchConditional": {
        "inputs": {"model_matched": {"link": "changed"}, "interval": 2},
        "nodes": {"changed": ["RescaleCFG", {}]},
    },
    "BlehRefinerAfter": {"inputs": {"time_mode": "percent", "start_time": 0.5}},
    "UltimateSDUpscaleCustomSample": UPSCALING,
    "UltimateSDUpscaleNoUpscale": {"inputs": TILES | {"tile_padding": 16}},
    "FluxSamplerParams+": {"inputs": {"seed": "42", "steps": "4"}},
    "FluxBlocksBuster+": {"inputs": {"blocks": "## 0 = 0.5\n# 1 = 0.5"}},
    "DynamicThresholdingFull": {"settings": {"cfg": 7.0}},
    "DynamicThresholdingSimple": {"settings": {"cfg": 7.0}},
    "Power Lora Loader (rgthree)": {"inputs": {"lora_1": {"on": True, "lora": "flux-dev.safetensors", "strength": 1.0}}},
}
SETTINGS: dict[str, dict] = {**COMFYUI, **KJNODES, **OTHERS}
