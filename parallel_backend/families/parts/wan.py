"""What Wan Animate and Wan Animate 2 share: Alibaba's key layout, which ComfyUI's files have, headers, text, CLIP's tokens.

Configurations are arguments of diffusers' WanTransformer3DModel.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..base.family import cached
from ..base.file_layout import HeaderConfig, header_arguments
from ..base.patching import Patching
from ..base.step_inputs import ROPE, ROPE_FREQUENCY, ArgumentCut, Config, Shapes, StepInputs
from .conditioning import count_blocks, hidden, text
from .cross_attention import TEXT_KEYS
from .key_map import WEIGHT, KeyMap
from .rope import FREQUENCY, OPTION, rope_tensors

PATCHING = Patching(video=True)
HEAD = 128
"""Width of a head in every Wan. Nothing in the weights shows it."""
PROMPT = 512
"""Text tokens to which ComfyUI's encoder for Wan pads a shorter prompt."""
ACCEPTS = ("clip_fea",)
"""`Inputs.accepts`: arguments that `conditioning` knows."""
OPTIONS = (OPTION, FREQUENCY)
"""`Inputs.options` of a model whose native class scales all positions in the same way."""
VECTORS = ("context", "picture")
"""`Inputs.vector_tensors` that both have."""
CUTS: dict[str, ArgumentCut] = {"rotary_emb": lambda turns, rows: rows.of_image(turns, 1)}
"""`BlockList.cuts` that both have."""
CACHED = cached(call=("condition_embedder", "condition_embedder.text_embedder"), prompt=("rope",)) | TEXT_KEYS
"""`Forward.cached_modules` that both have."""
IGNORED = (r".*\.norm_added_q\.weight",)
"""`FileLayout.ignored` that both have."""
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
    "flf_pos_embed_token_number": lambda _config: (None,),
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
PICTURE = "img_emb.proj.0.weight"
_PICTURE = {"norm1": "proj.0", "ff.net.0.proj": "proj.1", "ff.net.2": "proj.3", "norm2": "proj.4"}
_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}


def is_wan(shapes: Shapes) -> bool:
    """Whether a file of these keys is of a Wan that has layers for CLIP's picture."""
    return all(key in shapes for key in ("head.modulation", "blocks.0.self_attn.q.weight", PICTURE))


def header(model_type: str, **more: Callable[[Config], tuple[Any, ...]]) -> HeaderConfig:
    """Header of a model of this type. `more`: further entries of HeaderConfig.values."""
    return HeaderConfig(_HEADER | {"model_type": lambda _config: (model_type,)} | more, others=False)


def configure(shapes: Shapes) -> Config:
    """`FileLayout.configure` for the arguments that both have."""
    width, channels, *patch = shapes["patch_embedding.weight"]
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
        "image_dim": shapes[PICTURE][0],
        "added_kv_proj_dim": width,
        "rope_max_seq_len": 1024,  # a table, which may be of any length
    }


def key_map(config: Config, patches: str) -> KeyMap:
    """Key map of the modules that both have. `patches`: name of the module that embeds the latent."""
    keys = KeyMap()
    keys.copy({patches: "patch_embedding"} | _OUTSIDE)
    keys.tensor("scale_shift_table", "head.modulation")
    keys.inside("condition_embedder.image_embedder.", "img_emb.").copy(_PICTURE)
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
    attention.copy({"add_k_proj": "k_img", "add_v_proj": "v_img"})
    attention.copy({"norm_added_k": "norm_k_img"}, WEIGHT)


def conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, text_dim] and CLIP's `picture` [B, P, image_dim]; ROPE and ROPE_FREQUENCY with OPTIONS.

    ValueError for CLIP output of another model.
    """
    context, picture = text("Wan", config["text_dim"], call), call.get("clip_fea")
    more = rope_tensors(call)
    if picture is None:  # ComfyUI's native model then uses the text in place of the picture
        return more | {"context": torch.cat((context, context), dim=1)}
    if picture.shape[2] != config["image_dim"]:
        raise ValueError(
            f"positive, negative: the CLIP vision output has tokens of {picture.shape[2]}, this model needs "
            f"{config['image_dim']}. Use clip_vision_h."
        )
    return more | {"context": context, "picture": picture}


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


def example(config: Config, _text_tokens: int) -> dict[str, torch.Tensor]:
    """`Inputs.example` of the tensors that both need: the text takes the place of CLIP's picture, too."""
    return {"context": torch.randn(1, 2 * PROMPT, config["text_dim"])}


def arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    """Arguments of WanVariant.forward that both have."""
    return {
        "hidden_states": step.x,
        "timestep": step.timestep,
        "encoder_hidden_states": step.tensors["context"],
        "encoder_hidden_states_image": step.tensors.get("picture"),
        "rope": (step.tensors.get(ROPE), step.tensors.get(ROPE_FREQUENCY)),
    }
