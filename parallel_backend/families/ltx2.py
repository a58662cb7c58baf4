"""LTX-2, 2.3 and 2.5: text and pictures to video with sound. Two streams of tokens attend to each other in every block.

The sound is the video's companion latent (base/patching.Companion), and takes the place of the blocks' text stream. Prompts
are read by cross-attention after connectors, which ComfyUI's process runs once for a prompt (parts/ltx2_text.py). Key
layouts: Lightricks' (which ComfyUI's files use) and diffusers' LTX2VideoTransformer3DModel.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .base.blocks import IMAGE, IMAGE_TO_TEXT, TEXT, TEXT_TO_IMAGE, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, HeaderConfig, Source, header_arguments
from .base.patching import Companion, Patching
from .base.segments import text_then_image
from .base.step_inputs import Config, Shapes
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, NORM_BY_HEADS, ROTATION_BY_HEADS, ROW, ROW_BY_HEADS, LayerCut
from .parts import ltx2_inputs, ltx2_text
from .parts.conditioning import count_blocks
from .parts.key_map import BOTH, WEIGHT, KeyMap
from .parts.ltx2_inputs import FRAME_RATE, PIXELS, TIME, Patchifier

HEADS = 32
"""Attention heads of both streams in every LTX-2. Nothing in the weights shows it."""
BLOCKS = "transformer_blocks"
NEEDED = ("rope_type", "causal_temporal_positioning", "use_middle_indices_grid")
"""Entries that a header must have. ComfyUI's defaults for them are values that no LTX-2 was trained with."""
ROPES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
ATTENTIONS = {
    "attn1": IMAGE,
    "audio_attn1": TEXT,
    "audio_to_video_attn": IMAGE_TO_TEXT,
    "video_to_audio_attn": TEXT_TO_IMAGE,
}
_CROSS = ("attn2", "audio_attn2")
_TIMES = {  # diffusers module <- original module: embeddings of the time, each with a large layer at its end
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
}
_PROMPT_TIMES = {"prompt_adaln": "prompt_adaln_single", "audio_prompt_adaln": "audio_prompt_adaln_single"}
_TABLES = {
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
}
HEADER = HeaderConfig(  # what ComfyUI's LTXAVModel reads
    values={
        **header_arguments("in_channels", "attention_head_dim", "cross_attention_dim", "ff_bias", "num_layers"),
        **header_arguments(
            *(f"audio_{name}" for name in ("in_channels", "attention_head_dim", "cross_attention_dim", "ff_bias"))
        ),
        **header_arguments("caption_channels", "use_keyframes_abs_pos_embedding"),
        "image_model": lambda _config: ("ltxav",),
        "num_attention_heads": lambda _config: (HEADS,),
        "audio_num_attention_heads": lambda _config: (HEADS,),
        "positional_embedding_theta": lambda _config: (10000.0,),
        "positional_embedding_max_pos": lambda _config: ((20, 2048, 2048),),
        "audio_positional_embedding_max_pos": lambda _config: ((20,),),
        "causal_temporal_positioning": lambda _config: (True,),
        "use_middle_indices_grid": lambda _config: (True,),
        "vae_scale_factors": lambda _config: (PIXELS,),
        "timestep_scale_multiplier": lambda _config: (TIME,),
        "av_ca_timestep_scale_multiplier": lambda _config: (1.0, 1000.0),
        "rope_type": lambda _config: ("split", "interleaved"),
        "frequencies_precision": lambda _config: ("float64", "float32"),
        "apply_gated_attention": lambda config: (config["gated_attn"],),
        "caption_proj_before_connector": lambda config: (not config["use_prompt_embeddings"],),
        "caption_projection_first_linear": lambda config: (False, True) if config["use_prompt_embeddings"] else (False,),
        "cross_attention_adaln": lambda config: (config["cross_attn_mod"],),
        "use_prompt_adaln_single": lambda config: (
            (config["use_prompt_adaln_single"],) if config["cross_attn_mod"] else (True, False)
        ),
        **ltx2_text.HEADER,
    },
    others=True,
)


def _configure(shapes: Shapes) -> Config:
    first, (width, channels) = f"{BLOCKS}.0.", shapes["patchify_proj.weight"]
    audio_width, audio_channels = shapes["audio_patchify_proj.weight"]
    captions = "caption_projection.linear_2.weight" in shapes
    if not captions and "caption_projection.linear_1.weight" in shapes:
        raise ValueError("model_name: this is an LTX-2 that projects its text in one layer, which this version cannot run.")
    return {
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_attention_heads": HEADS,
        "attention_head_dim": width // HEADS,
        "cross_attention_dim": shapes[f"{first}attn2.to_k.weight"][1],
        "audio_in_channels": audio_channels,
        "audio_out_channels": shapes["audio_proj_out.weight"][0],
        "audio_num_attention_heads": HEADS,
        "audio_attention_head_dim": audio_width // HEADS,
        "audio_cross_attention_dim": shapes[f"{first}audio_attn2.to_k.weight"][1],
        "num_layers": count_blocks(shapes, f"{BLOCKS}."),
        "use_prompt_embeddings": captions,
        **({"caption_channels": shapes["caption_projection.linear_1.weight"][1]} if captions else {}),
        "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in shapes,
        "use_prompt_adaln_single": "prompt_adaln_single.linear.weight" in shapes,
        **dict.fromkeys(("gated_attn", "audio_gated_attn"), f"{first}attn1.to_gate_logits.weight" in shapes),
        **dict.fromkeys(("cross_attn_mod", "audio_cross_attn_mod"), f"{first}prompt_scale_shift_table" in shapes),
        "ff_bias": f"{first}ff.net.0.proj.bias" in shapes,
        "audio_ff_bias": f"{first}audio_ff.net.0.proj.bias" in shapes,
    }


def _stated(header: Mapping[str, Any]) -> Config:
    missing = next((entry for entry in NEEDED if entry not in header), None)
    if missing is not None:
        raise ValueError(
            f"model_name: the header of this LTX-2 file does not say its {missing}, as Lightricks' own files do. Whoever "
            "wrote the file lost it: even ComfyUI would compute something else than the model. Get it from another source."
        )
    return {
        "rope_type": header["rope_type"],
        "rope_double_precision": header.get("frequencies_precision", "float32") == "float64",
        "cross_attn_timestep_scale_multiplier": header.get("av_ca_timestep_scale_multiplier", 1.0),
        "caption_channels": header.get("caption_channels", 3840),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy({"proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj"})
    keys.same("proj_out", "audio_proj_out")
    prompt_times = config["cross_attn_mod"] and config["use_prompt_adaln_single"]
    for target, source in (_TIMES | (_PROMPT_TIMES if prompt_times else {})).items():
        names = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
        keys.inside(f"{target}.", f"{source}.").same(*names)
    if config["use_prompt_embeddings"]:
        for stream in ("caption_projection", "audio_caption_projection"):
            keys.same(f"{stream}.linear_1", f"{stream}.linear_2")
    for table in ("scale_shift_table", "audio_scale_shift_table"):
        keys.tensor(table)
    if config["use_keyframes_abs_pos_embedding"]:
        keys.tensor("keyframes_abs_pos_embedding")
    for block in keys.each(BLOCKS, BLOCKS, config["num_layers"]):
        _block_keys(block, config)
    return keys.sources


def _block_keys(block: KeyMap, config: Config) -> None:
    for target, source in _TABLES.items():
        block.tensor(target, source)
    for stream in ("", "audio_"):
        block.tensor(f"{stream}scale_shift_table")
        if config["cross_attn_mod"]:
            block.tensor(f"{stream}prompt_scale_shift_table")
        parameters = BOTH if config[f"{stream}ff_bias"] else WEIGHT
        block.same(f"{stream}ff.net.0.proj", f"{stream}ff.net.2", parameters=parameters)
    for name in (*ATTENTIONS, *_CROSS):
        attention = block.inside(f"{name}.", f"{name}.")
        attention.same("to_q", "to_k", "to_v", "to_out.0", *(("to_gate_logits",) if config["gated_attn"] else ()))
        attention.copy({"norm_q": "q_norm", "norm_k": "k_norm"}, WEIGHT)


class _Sizes(Sizes):
    def text_hidden(self, config: Config) -> int:
        """Channels of the sound, which is the text stream."""
        return config["audio_num_attention_heads"] * config["audio_attention_head_dim"]


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    widths = zip(("context", "sound_context"), ltx2_inputs.text_widths(config), strict=True)
    return {name: torch.randn(1, text_tokens, width) for name, width in widths} | {
        "seconds": torch.full((1,), 1.0 / FRAME_RATE)
    }


def _plan() -> dict[str, LayerCut]:
    plan: dict[str, LayerCut] = {}
    for name in (*ATTENTIONS, *_CROSS):
        plan |= dict.fromkeys([f"{name}.{layer}" for layer in ("to_q", "to_k", "to_v", "to_gate_logits")], COLUMN_BY_HEADS)
        plan |= {f"{name}.norm_q": NORM_BY_HEADS, f"{name}.norm_k": NORM_BY_HEADS, f"{name}.to_out.0": ROW_BY_HEADS}
    for name in ("ff", "audio_ff"):
        plan |= {f"{name}.net.0.proj": COLUMN, f"{name}.net.2": ROW}
    return plan


SOUND = Companion("b c t f -> b t (c f)", lambda frames: (8, max(1, 8 * frames - 7), 16))
PATCHING = Patching(side=1, video=True, companion=SOUND)
LTX2 = Family(
    name="ltx-2",
    model_class="LTX2VideoTransformer3DModel",
    class_module="parallel_backend.families.models.ltx2",
    native_classes=("LTXAV",),
    file=FileLayout(
        detect=lambda shapes: "patchify_proj.weight" in shapes and "audio_adaln_single.linear.weight" in shapes,
        configure=_configure,
        key_map=_key_map,
        header=replace(HEADER, arguments=_stated),
        settings=ltx2_text.SETTINGS,
    ),
    blocks=Blocks(
        lists=(
            BlockList(
                BLOCKS, returns=("image", "text"), text="audio_hidden_states", attention=ATTENTIONS, values_first=False
            ),
        ),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("proj_in", "audio_proj_in"),
        epilogue=("norm_out", "proj_out", "audio_norm_out", "audio_proj_out"),
        native={"double_block": BLOCKS},
        segments=text_then_image,
    ),
    sizes=_Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=ltx2_inputs.conditioning,
        accepts=ltx2_inputs.ACCEPTS,
        options=ltx2_inputs.OPTIONS,
        token_tensors=("voice",),
        vector_tensors=ltx2_inputs.VECTORS,
        exact=ltx2_inputs.EXACT,
        example=_example,
    ),
    forward=Forward(
        arguments=ltx2_inputs.arguments,
        cached_modules=cached(
            call=(*_TIMES, *_PROMPT_TIMES, *(f"*.attn2.{layer}" for layer in ("to_k", "to_v", "norm_k"))),
            prompt=("caption_projection", "audio_caption_projection"),
            band=ROPES,
        ),
    ),
    tensor_plan={BLOCKS: _plan(), **{name: {"": ROTATION_BY_HEADS} for name in ROPES}},
    patching=PATCHING,
    text_model=ltx2_text.TEXT_MODEL,
    native_values=lambda _config: {"patchifier": Patchifier(PATCHING), "a_patchifier": Patchifier(SOUND)},
)
