"""What Wan and its variants share: Alibaba's key layout, which ComfyUI's files have, headers, text and CLIP's tokens.

Configurations are arguments of diffusers' WanTransformer3DModel.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..base.file_layout import HeaderConfig, header_arguments
from ..base.patching import Patching
from ..base.step_inputs import REFERENCE_POSITIONS, REFERENCES, ROPE, ROPE_FREQUENCY, Config, Shapes, StepInputs
from .conditioning import count_blocks, hidden, text
from .key_map import WEIGHT, KeyMap
from .rope import FREQUENCY, OPTION, rope_tensors

PATCHING = Patching(video=True)
HEAD = 128
"""Width of a head in every model of this family. Nothing in the weights shows it."""
PIXELS = 8
"""Pixels along the side of a latent pixel."""
PROMPT = 512
"""Text tokens to which ComfyUI's encoder for Wan pads a shorter prompt."""
ACCEPTS = ("clip_fea", "denoise_mask")
"""`Inputs.accepts`: arguments that `conditioning` knows. ComfyUI has already made the frames' timesteps from the mask."""
TEXT_GUIDANCE = "text_guidance"
"""Entry of ComfyUI's transformer_options: (text [B, U, text_dim], settings [B, 3]) of normalized attention guidance."""
OPTIONS = (OPTION, FREQUENCY)
"""`Inputs.options` of variants whose native class scales all positions in the same way."""
MARKS = {  # a variant's name -> a key that only it has, in the order in which ComfyUI looks for them
    "vace": "vace_patch_embedding.weight",
    "camera": "control_adapter.conv.weight",
    "s2v": "casual_audio_encoder.encoder.final_linear.weight",
    "humo": "audio_proj.audio_proj_glob_1.layer.bias",
    "animate": "face_adapter.fuser_blocks.0.k_norm.weight",
    "scail2": "patch_embedding_mask.weight",
    "scail": "patch_embedding_pose.weight",
    "wandancer": "patch_embedding_global.weight",
    "reference": "ref_conv.weight",
}
_HEADER = {  # arguments of ComfyUI's WanModel, and what its supported_models asks for
    **header_arguments("ffn_dim", "freq_dim", "text_dim", "num_layers", "patch_size", "cross_attn_norm"),
    "image_model": lambda _config: ("wan2.1",),
    "causal_ar": lambda _config: (False,),
    "dim": lambda config: (config["num_attention_heads"] * HEAD,),
    "num_heads": lambda config: (config["num_attention_heads"],),
    "text_len": lambda _config: (PROMPT,),
    "in_dim": lambda config: (config["in_channels"],),
    "out_dim": lambda config: (config["out_channels"],),
    "window_size": lambda _config: ((-1, -1),),
    "qk_norm": lambda _config: (True,),
    "eps": lambda _config: (1e-6,),
    "flf_pos_embed_token_number": lambda config: (config["pos_embed_seq_len"],),
    "in_dim_ref_conv": lambda _config: (None,),
}
_OUTSIDE = {  # diffusers module <- original module
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}
_PICTURE = {"norm1": "proj.0", "ff.net.0.proj": "proj.1", "ff.net.2": "proj.3", "norm2": "proj.4"}
_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}


def kind(shapes: Shapes) -> str | None:
    """ComfyUI's name of the Wan variant that has these keys; "" for a plain Wan, None if it is no Wan."""
    if "head.modulation" not in shapes or "blocks.0.self_attn.q.weight" not in shapes:
        return None
    return next((name for name, key in MARKS.items() if key in shapes), "")


def header(*model_types: str, **more: Callable[[Config], tuple[Any, ...]]) -> HeaderConfig:
    """Header of a model of these types. `more`: further entries of HeaderConfig.values."""
    return HeaderConfig(_HEADER | {"model_type": lambda _config: model_types} | more, others=False)


def configure(shapes: Shapes) -> Config:
    """`FileLayout.configure` for the arguments that all variants have."""
    width, channels, *patch = shapes["patch_embedding.weight"]
    picture = shapes.get("img_emb.proj.0.weight", (None,))[0]
    return {
        "patch_size": (1, *patch)[-3:],  # GGUF has room for four sides
        "num_attention_heads": width // HEAD,
        "attention_head_dim": HEAD,
        "in_channels": channels,
        "out_channels": shapes["head.head.weight"][0] // torch.Size(patch).numel(),
        "text_dim": shapes["text_embedding.0.weight"][1],
        "freq_dim": shapes["time_embedding.0.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
        "num_layers": count_blocks(shapes, "blocks."),
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "image_dim": picture,
        "added_kv_proj_dim": None if picture is None else width,
        "rope_max_seq_len": 1024,  # a table, which may be of any length
        "pos_embed_seq_len": shapes.get("img_emb.emb_pos", (1, None))[1],
    }


def key_map(config: Config, patches: str) -> KeyMap:
    """Key map of the modules that all variants have. `patches`: name of the module that embeds the latent."""
    keys = KeyMap()
    keys.copy({patches: "patch_embedding"} | _OUTSIDE)
    keys.tensor("scale_shift_table", "head.modulation")
    picture = keys.inside("condition_embedder.image_embedder.", "img_emb.")
    if config["image_dim"] is not None:
        picture.copy(_PICTURE)
    if config["pos_embed_seq_len"] is not None:
        picture.tensor("pos_embed", "emb_pos")
    for block in keys.each("blocks", "blocks", config["num_layers"]):
        add_block(block, config)
    return keys


def add_block(block: KeyMap, config: Config) -> None:
    """Adds the layers of a block. `block`: the key map inside it."""
    block.tensor("scale_shift_table", "modulation")
    block.copy({"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"})
    block.copy({"norm2": "norm3"} if config["cross_attn_norm"] else {})
    for attention in (block.inside("attn1.", "self_attn."), block.inside("attn2.", "cross_attn.")):
        attention.copy(_ATTENTION)
        attention.same("norm_q", "norm_k", parameters=WEIGHT)
    if config["added_kv_proj_dim"] is not None:
        attention.copy({"add_k_proj": "k_img", "add_v_proj": "v_img"})
        attention.copy({"norm_added_k": "norm_k_img"}, WEIGHT)


def conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, text_dim] and, for models with layers for it, CLIP's `picture` [B, P, image_dim].

    With TEXT_GUIDANCE also `away` [B, U, text_dim or width] and `normalized` [B, 3] (models/wan_text.py). ROPE and
    ROPE_FREQUENCY with OPTIONS. ValueError for CLIP output of another model.
    """
    context, picture = text("Wan", config["text_dim"], call), call.get("clip_fea")
    more = rope_tensors(call)
    if TEXT_GUIDANCE in call:
        away, settings = call[TEXT_GUIDANCE]
        embedded = away.shape[-1] == hidden(config)  # by ComfyUI's native model
        width = hidden(config) if embedded else config["text_dim"]
        more |= {"away": text("Wan", width, {"context": away}), "normalized": settings}
    if config["image_dim"] is None:
        return more | {"context": context}  # the native model ignores the picture as well
    if picture is None:  # ComfyUI's native model then uses the text in place of the picture
        return more | {"context": torch.cat((context, context), dim=1)}
    tokens = config["pos_embed_seq_len"] or picture.shape[1]
    if picture.shape[1:] != (tokens, config["image_dim"]):
        raise ValueError(
            f"positive, negative: the CLIP vision output has {picture.shape[1]} tokens of {picture.shape[2]}, this model "
            f"needs {tokens} of {config['image_dim']}. Use clip_vision_h, and both a first and a last picture if the model "
            "was made for them."
        )
    return more | {"context": context, "picture": picture}


def packed(video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent [B, C, T, H, W] -> tokens [B, R, values] and their positions [R, 3] float32: frame, row, column."""
    patching = PATCHING.cut("frames")  # tokens in the class's order
    sides = (torch.arange(float(size)) for size in patching.grid(tuple(video.shape)))
    return patching.pack(video), torch.cartesian_prod(*sides)


def references(tokens: list[torch.Tensor], positions: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Conditioning tensors of references from the tokens [B, R, values] and positions [R, k] of each, concatenated."""
    packed = torch.cat(tokens, dim=1)
    return {REFERENCES: packed, REFERENCE_POSITIONS: torch.cat(positions).expand(len(packed), -1, -1).to(packed.device)}


def check_sizes(what: str, grid: tuple[int, ...], sizes: tuple[float, ...]) -> None:
    """ValueError if a video of these frames, rows and columns, called `what`, does not have the latent's whole patches."""
    frames, rows, columns = grid
    needed = (frames, 2 * rows, 2 * columns)
    if tuple(sizes) != needed:
        present, wanted = (" x ".join(f"{side:g}" for side in each) for each in (sizes, needed))
        raise ValueError(
            f"positive, negative: {what} is made for a latent of {present} (frames, rows, columns), the latent_image takes "
            f"{wanted}. Give both nodes the same length, width and height, and those in multiples of 16."
        )


def native_values(config: Config) -> dict[str, Any]:
    """`Family.native_values`: those that RIFLEx's node reads."""
    return {"dim": hidden(config), "num_heads": config["num_attention_heads"]}


def example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    """`Inputs.example` of the tensors that every variant needs."""
    tokens = text_tokens if config["image_dim"] is None else 2 * PROMPT
    return {"context": torch.randn(1, tokens, config["text_dim"])}


def arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    """Arguments of WanVariant.forward that all variants have."""
    picture, time = step.tensors.get("picture"), step.timestep
    if picture is not None and config["pos_embed_seq_len"] is not None:  # the class takes first and last picture as a batch
        picture = picture.reshape(2 * len(picture), -1, picture.shape[-1])
    if time.ndim == 2:  # a time for each frame; the class takes one for each token
        time = time.repeat_interleave(torch.Size(step.grid[1:]).numel(), dim=1)
    return {
        "hidden_states": step.x,
        "timestep": time,
        "encoder_hidden_states": step.tensors["context"],
        "encoder_hidden_states_image": picture,
        "away": step.tensors.get("away"),
        "normalized": step.tensors.get("normalized"),
        "rope": (step.tensors.get(ROPE), step.tensors.get(ROPE_FREQUENCY)),
    }
