"""MiniMax H3: a video and its sound in one sequence, with keyframes and references; plain and pruned files.

Key layouts: MiniMax's (which ComfyUI's files use) and diffusers' MiniMaxH3Transformer3DModel.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .base.blocks import BlockList, Blocks, Projections
from .base.family import Family, Finish, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, HeaderConfig, Source, header_arguments
from .base.patching import Latents
from .base.step_inputs import REFERENCES, Config, Shapes
from .base.tensor_plan import COLUMN_BY_HEADS, GATHER, ROW, ROW_BY_HEADS, WIDTH, CutKind, LayerCut
from .parts.conditioning import count_blocks
from .parts.key_map import WEIGHT, KeyMap
from .parts.minimax_conditioning import SHIFTS, VECTORS, carried, conditioning, reference_runs, videos
from .parts.minimax_layout import PATCHING, SOUND_CHANNELS, segments
from .parts.minimax_tokens import arguments

BLOCKS = "transformer_blocks"
_OUTSIDE = {  # diffusers module <- original module
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
}
_TIME = {"time_embedder.linear_1": "time_embedder.proj_in", "time_embedder.linear_2": "time_embedder.proj_out"}
GATE = "attn.to_gate_compress"
"""Layer of FastH3's blocks, which video sparse attention (VSA) alone reads."""
_BLOCK_PLAN = {
    **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), COLUMN_BY_HEADS),
    "attn.to_out.0": ROW_BY_HEADS,
    GATE: COLUMN_BY_HEADS,
    "ff.net.0.proj": LayerCut(CutKind.COLUMN, (WIDTH, WIDTH)),  # SwiGLU: value and gate
    "ff.net.2": ROW,
}
HEADER = HeaderConfig(  # arguments of ComfyUI's class, which ignores others
    values={
        **header_arguments("hidden_size", "num_layers", "num_attention_heads", "attention_head_dim"),
        **header_arguments("text_dim", "time_embed_dim", "adaln_curve_grid", "gate_compress"),
        "image_model": lambda _config: ("minimax_h3",),
        "token_refiner_num_layers": lambda config: (config["num_refiner_layers"],),
        "ffn_hidden_size": lambda config: (config["ffn_dim"],),
        "latents_dim": lambda config: (config["in_channels"],),
        "audio_latents_dim": lambda config: (config["audio_in_channels"],),
        "patch_size": lambda _config: ((1, 2, 2),),
        "timestep_input_dim": lambda config: (config["freq_dim"],),
        "time_embed_hidden_size": lambda config: (config["time_embed_hidden_dim"],),
        "rope_inv_freq_len": lambda config: (config["rope_freq_dim"],),
        **{f"{name}_eps": lambda _config: (1e-5,) for name in ("norm", "qk_norm", "final_norm")},
        "sigma_shift_video": lambda _config: (12.0,),
        "sigma_shift_audio": lambda _config: (3.0,),
    },
    others=True,
)
_MASKS = ("denoise_mask", "audio_denoise_mask")
_FLOAT32 = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
_CURVE = ("adaln_t_table", "*.adaln_proj.linear", "norm_out.linear")


def _configure(shapes: Shapes) -> Config:
    hidden, video = shapes["video_patch_proj.weight"]
    head = shapes["blocks.0.attn.q_norm.weight"][0]
    table, sound = shapes.get("adaln_t_table"), shapes["audio_patch_proj.weight"][1]
    if sound != SOUND_CHANNELS:
        raise ValueError(f"model_name: this MiniMax H3 takes sound of {sound} channels, ComfyUI's has {SOUND_CHANNELS}.")
    frequencies, time_hidden, width, rows = 256, 5376, 0, None  # pruned files do not use the first two
    if table is None:
        time_hidden, frequencies = shapes["time_embedder.proj_in.weight"]
        width = shapes["time_embedder.proj_out.weight"][0]
    else:
        rows, width = table
    return {
        "num_attention_heads": shapes["blocks.0.attn.qkv_proj.weight"][0] // (3 * head),
        "attention_head_dim": head,
        "hidden_size": hidden,
        "num_layers": count_blocks(shapes, "blocks."),
        "num_refiner_layers": count_blocks(shapes, "token_refiner.blocks."),
        "ffn_dim": shapes["blocks.0.mlp.fc2.weight"][1],
        "in_channels": video // 4,
        "audio_in_channels": sound,
        "patch_size": (1, 2, 2),
        "text_dim": shapes["condition_proj.weight"][1],
        "freq_dim": frequencies,
        "time_embed_hidden_dim": time_hidden,
        "time_embed_dim": width,
        "rope_freq_dim": shapes["rope.inv_freq"][0],
        "adaln_curve_grid": rows,
        "gate_compress": f"blocks.0.{GATE}.weight" in shapes,
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE)
    keys.copy({"norm_out.norm": "final_layer.norm"}, WEIGHT)
    keys.same("token_refiner.final_norm", parameters=WEIGHT)
    if config.get("adaln_curve_grid") is None:
        keys.copy(_TIME)
    else:
        keys.tensor("adaln_t_table")
    for block in keys.each("token_refiner.refiner_blocks", "token_refiner.blocks", config["num_refiner_layers"]):
        _block_keys(block, config)
    for block in keys.each(BLOCKS, "blocks", config["num_layers"]):
        block.same("adaln_proj.linear")
        if config.get("gate_compress"):
            block.same(GATE, parameters=WEIGHT)
        _block_keys(block, config)
    return keys.sources


def _block_keys(block: KeyMap, config: Config) -> None:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    block.same("norm1", "norm2", parameters=WEIGHT)
    names = {
        "attn.norm_q": "attn.q_norm",
        "attn.norm_k": "attn.k_norm",
        "attn.to_out.0": "attn.out_proj",
        "ff.net.2": "mlp.fc2",
    }
    block.copy(names, WEIGHT)
    block.copy({"ff.net.0.proj": "mlp.fc1"}, WEIGHT, swap_halves=True)
    block.split("attn.qkv_proj", dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), width), WEIGHT)


class _FileLayout(FileLayout):
    def computed(self, config: Config) -> dict[str, tuple[int, ...]]:
        return {"rope.inv_freq": (config["rope_freq_dim"],)}


class _Inputs(Inputs):
    def references(self, call: Mapping[str, Any]) -> list[torch.Tensor]:
        return videos(call)

    def reference_runs(self, call: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        return reference_runs(call.get("minimax_payload") or {})

    def carried(self, latents: Latents, timestep: torch.Tensor, call: dict[str, Any]) -> tuple[Latents, Finish]:
        return carried(latents, timestep, call)


class _Forward(Forward):
    def float32(self, config: Config) -> tuple[str, ...]:
        return *_FLOAT32, *(_CURVE if config.get("adaln_curve_grid") else ())


MINIMAX_H3 = Family(
    name="minimax-h3",
    model_class="MiniMaxH3Transformer3DModel",
    class_module="parallel_backend.families.models.minimax_h3",
    native_classes=("MiniMaxH3",),
    file=_FileLayout(
        detect=lambda shapes: {"video_patch_proj.weight", "audio_patch_proj.weight"} <= shapes.keys(),
        configure=_configure,
        key_map=_key_map,
        header=HEADER,
    ),
    blocks=Blocks(
        lists=(BlockList(BLOCKS, returns=("image",), joined=True, projections=Projections(rotary_argument="rotary_emb")),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("proj_in", "audio_proj_in", "context_embedder", "token_refiner"),
        epilogue=("norm_out", "proj_out", "audio_proj_out"),
        controlled_sequence=segments,
        native={"double_block": BLOCKS},
        segments=segments,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"], hidden=lambda config: config["hidden_size"]),
    inputs=_Inputs(
        conditioning=conditioning,
        accepts=("minimax_payload", *_MASKS),
        output_masks=_MASKS,
        options=tuple(SHIFTS),
        token_tensors=("context",),
        whole_text=True,
        vector_tensors=VECTORS,
        exact=("shifts", "levels", REFERENCES),
        example=lambda config, tokens: conditioning(config, {"context": torch.randn(1, tokens, config["text_dim"])}),
    ),
    forward=_Forward(
        arguments=arguments,
        cached_modules=cached(
            call=("*.adaln_proj.linear", "norm_out.linear", "time_embedder"),
            prompt=("context_embedder", "token_refiner"),
            band=("rope",),
        ),
    ),
    tensor_plan={
        BLOCKS: _BLOCK_PLAN | {"adaln_proj.linear": GATHER},
        "token_refiner": {f"*.{layer}": cut for layer, cut in _BLOCK_PLAN.items() if layer != GATE},
    },
    patching=PATCHING,
    native_values=lambda config: {
        "patch_size": (1, 2, 2),
        # Model Sparse Attention warns where VSA has no gate, and goes on without it.
        **({} if config.get("gate_compress") else {f"blocks.*.{GATE}": None}),
        "preprocess_text_embeds": lambda text: text,
        **{name.removeprefix("minimax_h3_"): usual for name, usual in SHIFTS.items()},
    },
)
