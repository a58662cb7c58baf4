"""Where the model files of the bundled workflows are published: ComfyUI offers what is missing for download."""

_HF = "https://huggingface.co"
_WAN, _ANIMATE, _QWEN_21, _H3 = (
    f"{_HF}/Comfy-Org/{name}/resolve/main"
    for name in ("Wan_2.2_ComfyUI_Repackaged", "Wan-Animate-2", "Qwen-Image-2.1", "MiniMax-H3")
)
_FLUX_2, _Z_IMAGE = (f"{_HF}/Comfy-Org/{name}/resolve/main/split_files" for name in ("flux2-dev", "z_image_turbo"))
_QWEN_EDIT = f"{_HF}/Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main"
_FLUX_TEXT = f"{_HF}/comfyanonymous/flux_text_encoders/resolve/main"
_FOLDERS = {
    "checkpoints": {
        "ltx-2.3-22b-distilled-fp8": f"{_HF}/Lightricks/LTX-2.3-fp8/resolve/main",
        "sd3.5_large_fp8_scaled": f"{_HF}/Comfy-Org/stable-diffusion-3.5-fp8/resolve/main",
    },
    "clip_vision": {"clip_vision_h": f"{_ANIMATE}/clip_vision"},
    "diffusion_models": {
        "flux1-dev": f"{_HF}/Comfy-Org/flux1-dev/resolve/main",
        "flux1-schnell": f"{_HF}/Comfy-Org/flux1-schnell/resolve/main",
        "flux2_dev_fp8mixed": f"{_FLUX_2}/diffusion_models",
        "z_image_turbo_bf16": f"{_Z_IMAGE}/diffusion_models",
        "krea2_turbo_fp8_scaled": f"{_HF}/Comfy-Org/Krea-2/resolve/main/diffusion_models",
        "qwen_image_edit_2511_fp8mixed": f"{_QWEN_EDIT}/split_files/diffusion_models",
        "qwen_image_2.1_int8_convrot": f"{_QWEN_21}/diffusion_models",
        "wan2.2_t2v_high_noise_14B_fp8_scaled": f"{_WAN}/split_files/diffusion_models",
        "wan2.2_t2v_low_noise_14B_fp8_scaled": f"{_WAN}/split_files/diffusion_models",
        "wan_animate_2_distill_int8_convrot": f"{_ANIMATE}/diffusion_models",
        "minimax_h3_fl2va_pruned_int8_convrot": f"{_H3}/diffusion_models",
        "fastvideo_fasth3_8step_v2_pruned_int8_convrot": (
            f"{_HF}/FastVideo/FastVideo-FastH3-Comfy/resolve/main/diffusion_models"
        ),
    },
    "text_encoders": {
        "clip_l": _FLUX_TEXT,
        "t5xxl_fp8_e4m3fn": _FLUX_TEXT,
        "mistral_3_small_flux2_fp8": f"{_FLUX_2}/text_encoders",
        "qwen_3_4b": f"{_Z_IMAGE}/text_encoders",
        "qwen3vl_4b_fp8_scaled": f"{_HF}/Comfy-Org/Krea-2/resolve/main/text_encoders",
        "qwen3vl_8b_int8_convrot": f"{_QWEN_21}/text_encoders",
        "qwen_2.5_vl_7b_fp8_scaled": f"{_HF}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders",
        "umt5_xxl_fp8_e4m3fn_scaled": f"{_HF}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/text_encoders",
        "gemma_3_12B_it_fp4_mixed": f"{_HF}/Comfy-Org/ltx-2/resolve/main/split_files/text_encoders",
        "qwen3vl_32b_minimax_h3_nvfp4_awq": f"{_H3}/text_encoders",
    },
    "vae": {
        "ae": f"{_Z_IMAGE}/vae",
        "flux2-vae": f"{_FLUX_2}/vae",
        "sdxl_vae": f"{_HF}/stabilityai/sdxl-vae/resolve/main",
        "qwen_image_vae": f"{_HF}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/vae",
        "qwen_image_2.1_vae_bf16": f"{_QWEN_21}/vae",
        "wan_2.1_vae": f"{_WAN}/split_files/vae",
        "minimax_h3_video_vae_fp16": f"{_H3}/vae",
        "minimax_h3_audio_vae_fp32": f"{_H3}/vae",
    },
}
PUBLISHED = {
    f"{name}.safetensors": {"name": f"{name}.safetensors", "url": f"{place}/{name}.safetensors", "directory": folder}
    for folder, files in _FOLDERS.items()
    for name, place in files.items()
}
"""File -> its entry in a loader's `properties.models`, in the form of ComfyUI's own templates."""
NOT_PUBLISHED = ("PixArt-Sigma-XL-2-2K-MS.safetensors", "flux_style.safetensors")
"""Files of the user's own choice, and files that users rename."""
