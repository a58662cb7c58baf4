"""Published models: arguments of ComfyUI's class beside those of native_files.ARGUMENTS, and the inputs of a call."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

IMAGE, VIDEO = (64, 64), (5, 32, 32)
"""Latent rows and columns, and frames in front of them. A trial takes smaller ones."""
LTX_2 = {
    "_class_name": "AVTransformer3DModel",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": 128,
    "attention_type": "default",
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "audio_num_attention_heads": 32,
    "audio_out_channels": 128,
    "audio_positional_embedding_max_pos": [20],
    "av_ca_timestep_scale_multiplier": 1000.0,
    "av_cross_ada_norm": True,
    "caption_channels": 3840,
    "causal_temporal_positioning": True,
    "connector_attention_head_dim": 128,
    "connector_norm_output": True,
    "connector_num_attention_heads": 30,
    "connector_num_layers": 2,
    "connector_num_learnable_registers": 128,
    "connector_positional_embedding_max_pos": [4096],
    "cross_attention_dim": 4096,
    "cross_attention_norm": True,
    "double_self_attention": False,
    "dropout": 0.0,
    "frequencies_precision": "float64",
    "in_channels": 128,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "norm_num_groups": 32,
    "num_attention_heads": 32,
    "num_embeds_ada_norm": 1000,
    "num_layers": 48,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "out_channels": 128,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "positional_embedding_theta": 10000.0,
    "positional_embedding_type": "rope",
    "qk_norm": "rms_norm",
    "rope_type": "split",
    "share_ff": False,
    "standardization_norm": "rms_norm",
    "timestep_scale_multiplier": 1000,
    "upcast_attention": False,
    "use_audio_video_cross_attention": True,
    "use_embeddings_connector": True,
    "use_linear_projection": False,
    "use_middle_indices_grid": True,
}
LTX_23 = LTX_2 | {
    "apply_gated_attention": True,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_attention_heads": 32,
    "caption_proj_before_connector": True,
    "caption_proj_input_norm": False,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "connector_apply_gated_attention": True,
    "connector_learnable_registers_std": 1,
    "connector_num_attention_heads": 32,
    "connector_num_layers": 8,
    "cross_attention_adaln": True,
    "text_encoder_norm_type": "per_token_rms",
}
"""What the headers of Lightricks' files of LTX-2 (19B) and LTX-2.3 (22B) say about the transformer."""


@dataclass(frozen=True)
class Published:
    """`kind`: class of ComfyUI's supported_models. `text`: [tokens, width]. `latents`: [C, (T,) H, W], and a companion's.

    `more`: entries of the conditioning: shapes of tensors, lists of them, {"ones": shape}, or {"is": value}. Names with a
    point are an attribute of an object. `header`: of the file. `cfg`: 1 for a call of the positive prompt alone.
    """

    kind: str
    text: tuple[int, int]
    latents: tuple[tuple[int, ...], ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
    cfg: float = 3.0


def image(kind: str, text: tuple[int, int], channels: int, arguments: Mapping[str, Any] = {}, **more: Any) -> Published:
    return Published(kind, text, ((channels, *IMAGE),), arguments, more)


def one_frame(kind: str, text: tuple[int, int], channels: int, arguments: Mapping[str, Any] = {}, **more: Any) -> Published:
    return Published(kind, text, ((channels, 1, *IMAGE),), arguments, more)


def video(kind: str, text: tuple[int, int], channels: int, arguments: Mapping[str, Any] = {}, **more: Any) -> Published:
    return Published(kind, text, ((channels, *VIDEO),), arguments, more)


FLUX = {"depth": 19, "depth_single_blocks": 38}
POOLED = {"pooled_output": (768,)}
T5 = (256, 4096)
KLEIN_9B = {"depth": 8, "depth_single_blocks": 24, "hidden_size": 4096, "num_heads": 32, "context_in_dim": 12288}
KLEIN_4B = {"depth": 5, "depth_single_blocks": 20, "hidden_size": 3072, "num_heads": 24, "context_in_dim": 7680}
QUICKSTART = {
    "depth": 1,
    "depth_single_blocks": 4,
    "hidden_size": 256,
    "num_heads": 2,
    "context_in_dim": 32,
    "vec_in_dim": 16,
}
OVIS = {
    "depth": 6,
    "depth_single_blocks": 27,
    "yak_mlp": True,
    "txt_norm": True,
    "vec_in_dim": None,
    "context_in_dim": 2048,
    "txt_ids_dims": [1, 2],
}
COG_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
KANDINSKY_IMAGE = {"ff_dim": 10240, "num_visual_blocks": 50, "axes_dims": (32, 48, 48)}
HUNYUAN = {"depth": 20, "depth_single_blocks": 40}
SD35 = {"qk_norm": "rms"}
X_BLOCKS = {"x_block_self_attn_layers": list(range(13)), "num_patches": 147456, "pos_embed_max_size": 384}
LARGE = SD35 | {
    "depth": 38,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}},
}
WAN_1B = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}
WAN_5B = {"in_dim": 48, "out_dim": 48, "dim": 3072, "ffn_dim": 14336, "num_heads": 24, "num_layers": 30}
WAN_14B = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
COSMOS_1 = {
    "affline_emb_norm": True,
    "block_x_format": "THWBD",
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}
SEEDVR2_SHARP = {
    "vid_dim": 3072,
    "heads": 24,
    "num_layers": 36,
    "rope_type": "rope3d",
    "rope_dim": 64,
    "vid_out_norm": None,
}
SEEDVR2_7B = SEEDVR2_SHARP | {"mm_layers": 36, "mlp_type": "normal"}
OMNIGEN_2 = {
    "hidden_size": 2520,
    "num_layers": 32,
    "num_attention_heads": 21,
    "num_kv_heads": 7,
    "text_feat_dim": 2048,
    "axes_dim_rope": [40, 40, 40],
    "axes_lens": [1024, 1664, 1664],
    "timestep_scale": 1000.0,
}
WORDS = (512, 4096)
SHARPENED = (58, 5120), 16
CHANNELS = {"concat_latent_image": (16, *VIDEO), "concat_mask": (1, *VIDEO)}
CLIP = {"clip_vision_output.penultimate_hidden_states": (257, 1280)}
SOUND = {"audio_embed": (25, 1024, 20)}
WITH_SOUND = ((128, 5, 16, 16), (8, 33, 16))
LTX_VIDEO = {"frame_rate": {"is": 24.0}, "attention_mask": {"ones": (128,)}}
UNPROCESSED = {"unprocessed_ltxav_embeds": {"is": True}, "frame_rate": {"is": 24.0}}

PUBLISHED = {
    "minimax-h3": Published("MiniMaxH3", (32, 5120), ((24, 5, 30, 54), (32, 2, 21)), {"num_layers": 50}),
    "ltx-2.3": Published("LTXAV", (128, 4096 + 2048), WITH_SOUND, LTX_23, UNPROCESSED, LTX_23),
    "ltx-2": Published("LTXAV", (128, 3840), WITH_SOUND, LTX_2, UNPROCESSED, LTX_2),
    "wan-2.2-t2v-14b": video("WAN21_T2V", WORDS, 16, WAN_14B),
    "wan-2.2-i2v-14b": video("WAN21_T2V", WORDS, 16, WAN_14B | {"in_dim": 36}, **CHANNELS),
    "flux-dev": image("Flux", T5, 16, FLUX, **POOLED),
    "z-image": image("ZImage", (64, 2560), 16),
    "qwen-image": one_frame("QwenImage", (64, 3584), 16, {"num_layers": 60}),
    "krea-2": one_frame("Krea2", (64, 12 * 2560), 16, {"layers": 28}),
    "flux2-dev": image("Flux2", (512, 15360), 128, {"depth": 8, "depth_single_blocks": 48}),
    "flux-kontext": image("Flux", T5, 16, FLUX, reference_latents=[(16, *IMAGE)], **POOLED),
    "qwen-image-edit": one_frame("QwenImage", (64, 3584), 16, {"num_layers": 60}, reference_latents=[(16, 1, *IMAGE)]),
    "flux2-klein-4b": image("Flux2", (512, 7680), 128, KLEIN_4B | {"guidance_embed": False}),
    "flux2-klein-9b": image("Flux2", (512, 12288), 128, KLEIN_9B | {"guidance_embed": False}),
    "wan-2.1-t2v-1.3b": video("WAN21_T2V", WORDS, 16, WAN_1B),
    "wan-2.2-5b": video("WAN22_T2V", WORDS, 48, WAN_5B),
    "wan-2.1-i2v-14b": video("WAN21_I2V", WORDS, 16, WAN_14B | {"in_dim": 36, "model_type": "i2v"}, **CHANNELS, **CLIP),
    "wan-2.1-i2v-14b-without-clip": video("WAN21_I2V", WORDS, 16, WAN_14B | {"in_dim": 36}, **CHANNELS),
    "sd3.5-large": image("SD3", (154, 4096), 16, LARGE, pooled_output=(2048,)),
    "sd3.5-medium": image("SD3", (154, 4096), 16, SD35 | X_BLOCKS, pooled_output=(2048,)),
    "flux-fill": image("FluxInpaint", T5, 16, FLUX, **POOLED),
    "flux-schnell": image("FluxSchnell", T5, 16, FLUX, **POOLED),
    "quickstart-digits": image("FluxSchnell", (4, 32), 16, QUICKSTART, pooled_output=(16,)),
    "chroma": image("Chroma", T5, 16, FLUX),
    "auraflow": image("AuraFlow", (256, 2048), 4),
    "hunyuan-video-1.5": video(
        "HunyuanVideo15",
        (256, 3584),
        32,
        {"depth": 54, "depth_single_blocks": 0},
        conditioning_byt5small=(32, 1472),
        pooled_output={"is": None},
    ),
    "hunyuan-video": video("HunyuanVideo", (256, 4096), 16, HUNYUAN, **POOLED),
    "lumina-2": image("Lumina2", (64, 2304), 16),
    "omnigen-2": image("Omnigen2", (64, 2048), 16, OMNIGEN_2, attention_mask={"ones": (64,)}),
    "boogu-image": image("Boogu", (64, 4096), 16, attention_mask={"ones": (64,)}),
    "lens": image("Lens", (64, 4 * 2880), 128),
    "mage-flow": image("MageFlow", (64, 2560), 128),
    "joyimage": one_frame("JoyImage", (64, 4096), 16),
    "mochi": video("GenmoMochi", T5, 12, attention_mask={"ones": (256,)}),
    "chroma-radiance": Published("ChromaRadiance", T5, ((3, 128, 128),), FLUX),
    "longcat-image": image("LongCatImage", (128, 3584), 16, {"depth": 10, "depth_single_blocks": 20}),
    "ernie-image": image("ErnieImage", (64, 3072), 128),
    "hidream-i1": image(
        "HiDream",
        (128, 4096),
        16,
        {"num_layers": 16, "num_single_layers": 32, "llama_layers": [*range(32), *([31] * 16)]},
        pooled_output=(2048,),
        conditioning_llama3=(32, 128, 4096),
    ),
    "hunyuan-image-2.1": image("HunyuanImage21", (256, 3584), 64, HUNYUAN, conditioning_byt5small=(32, 1472)),
    "ideogram-4": image("Ideogram4", (64, 53248), 128),
    "kandinsky-5-lite": video("Kandinsky5", (128, 3584), 16, **POOLED),
    "cosmos-predict2-2b": one_frame("CosmosT2IPredict2", (512, 1024), 16),
    "anima": one_frame("Anima", (128, 1024), 16),
    "wan-2.1-vace-14b": video("WAN21_Vace", WORDS, 16, WAN_14B),
    "wan-s2v": video("WAN22_S2V", WORDS, 16, WAN_14B, **SOUND),
    "humo-17b": video("WAN21_HuMo", WORDS, 16, WAN_14B | {"in_dim": 36}, audio_embed=(5, 8, 5, 1280)),
    "wan-dancer": video("WAN22_WanDancer", WORDS, 16, WAN_14B | {"in_dim": 36}, audio_embed=(17, 35), **CHANNELS),
    "cosmos-1-7b": video("CosmosT2V", (512, 1024), 16, COSMOS_1),
    "ltx-video-2b": Published("LTXV", (128, 4096), ((128, 5, 16, 16),), {}, LTX_VIDEO),
    "hunyuan-dit": image(
        "HunyuanDiT",
        (77, 1024),
        4,
        {"hidden_size": 1408, "depth": 40, "mlp_ratio": 4.3637},
        attention_mask={"ones": (77,)},
        conditioning_mt5xl=(256, 2048),
        attention_mask_mt5xl={"ones": (256,)},
    ),
    "pixart-sigma": image("PixArtSigma", (300, 4096), 4, {"depth": 28}),
    "cogvideox-5b": video("CogVideoX_T2V", (226, 4096), 16, COG_5B),
    "cogvideox-1.5-5b": video("CogVideoX_T2V", (226, 4096), 16, COG_5B | {"patch_size_t": 2}),
    "kandinsky-5-lite-image": image("Kandinsky5Image", (128, 3584), 16, KANDINSKY_IMAGE, **POOLED),
    "ovis-image": image("FluxSchnell", (256, 2048), 16, OVIS),
    "wan-2.2-camera-14b": video(
        "WAN22_Camera", WORDS, 16, WAN_14B | {"in_dim": 36}, camera_conditions=(24, 5, 256, 256), **CHANNELS
    ),
    "scail-14b": video(
        "WAN21_SCAIL",
        WORDS,
        16,
        WAN_14B | {"in_dim": 20},
        reference_latents=[(16, 1, 32, 32)],
        pose_video_latent=(16, 5, 16, 16),
        **CLIP,
    ),
    "wan-2.2-animate-14b": video(
        "WAN22_Animate",
        WORDS,
        16,
        WAN_14B | {"in_dim": 36, "model_type": "animate"},
        pose_video_latent=(16, 4, 32, 32),
        face_video_pixels=(3, 1, 512, 512),
        **CHANNELS,
        **CLIP,
    ),
    "seedvr2-3b": video("SeedVR2", *SHARPENED, condition=(17, *VIDEO)),
    "seedvr2-3b-image": one_frame("SeedVR2", *SHARPENED, condition=(17, 1, *IMAGE)),
    "seedvr2-7b": replace(video("SeedVR2", *SHARPENED, SEEDVR2_7B, condition=(17, *VIDEO)), cfg=1.0),
    "seedvr2-7b-image": replace(one_frame("SeedVR2", *SHARPENED, SEEDVR2_7B, condition=(17, 1, *IMAGE)), cfg=1.0),
    "seedvr2-7b-sharp": video("SeedVR2", *SHARPENED, SEEDVR2_SHARP, condition=(17, *VIDEO)),
    "seedvr2-7b-sharp-image": one_frame("SeedVR2", *SHARPENED, SEEDVR2_SHARP, condition=(17, 1, *IMAGE)),
    "wan-animate-2-14b": Published(
        "WAN_Animate2",
        WORDS,
        ((16, *VIDEO),),
        WAN_14B | {"in_dim": 36},
        {
            **CHANNELS,
            **CLIP,
            "clip_vision_output_pose.penultimate_hidden_states": (257, 1280),
            "cross_attn_pose": WORDS,
            "pose_video_latent": (16, 4, 32, 32),
        },
        {"model_type": "animate2"},
    ),
}
"""By name, the most used ones first."""
