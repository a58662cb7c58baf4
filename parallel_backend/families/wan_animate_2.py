"""Wan Animate 2: a character's picture moves as a person in another video. Only its header tells a file from Wan's.

Its key layout is Alibaba's, which ComfyUI's files have. Configurations are arguments of diffusers' WanTransformer3DModel.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .base.blocks import PAIRED, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, HeaderConfig, Source, header_arguments
from .base.patching import Patching
from .base.step_inputs import ArgumentCut, Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, NORM_BY_HEADS, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, hidden, text
from .parts.key_map import WEIGHT, KeyMap

KIND = "animate2"
HEAD = 128
"""Width of a head in every Wan. Nothing in the weights shows it."""
PROMPT = 512
"""Text tokens to which ComfyUI's encoder for Wan pads a shorter prompt."""
PICTURE = "img_emb.proj.0.weight"
"""A key of the layers for CLIP's picture."""
FACE = "face_adapter.fuser_blocks.0.k_norm.weight"
"""A key that Wan 2.2 Animate alone has."""
_HEADER = {  # arguments of ComfyUI's class, and what its supported_models asks for
    **header_arguments("ffn_dim", "freq_dim", "text_dim", "num_layers", "patch_size", "cross_attn_norm"),
    "model_type": lambda _config: (KIND,),
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
    "patch_embedding.video": "patch_embedding",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}
_PICTURE = {"norm1": "proj.0", "ff.net.0.proj": "proj.1", "ff.net.2": "proj.3", "norm2": "proj.4"}
_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}


def _detect(shapes: Shapes) -> bool:
    return FACE not in shapes and all(key in shapes for key in ("head.modulation", "blocks.0.self_attn.q.weight", PICTURE))


def _configure(shapes: Shapes) -> Config:
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


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE)
    keys.tensor("scale_shift_table", "head.modulation")
    keys.inside("condition_embedder.image_embedder.", "img_emb.").copy(_PICTURE)
    for block in keys.each("blocks", "blocks", config["num_layers"]):
        _add_block(block, config)
    return keys.sources


def _add_block(block: KeyMap, config: Config) -> None:
    """Adds the layers of a block. `block`: the key map inside it."""
    block.tensor("scale_shift_table", "modulation")
    block.copy({"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"})
    block.copy({"norm2": "norm3"} if config["cross_attn_norm"] else {})
    for attention in (block.inside("attn1.", "self_attn."), block.inside("attn2.", "cross_attn.")):
        attention.copy(_ATTENTION)
        attention.same("norm_q", "norm_k", parameters=WEIGHT)
    attention.copy({"add_k_proj": "k_img", "add_v_proj": "v_img"})
    attention.copy({"norm_added_k": "norm_k_img"}, WEIGHT)


def _text(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, text_dim] and CLIP's `picture` [B, P, image_dim]. ValueError for CLIP output of another model."""
    context, picture = text("Wan", config["text_dim"], call), call.get("clip_fea")
    if picture is None:  # ComfyUI's native model then uses the text in place of the picture
        return {"context": torch.cat((context, context), dim=1)}
    if picture.shape[2] != config["image_dim"]:
        raise ValueError(
            f"positive, negative: the CLIP vision output has tokens of {picture.shape[2]}, this model needs "
            f"{config['image_dim']}. Use clip_vision_h."
        )
    return {"context": context, "picture": picture}


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As _text, and `reference` [B]: strength of frame 0. With a pose also `pose` [B, 16, T - 1, H, W] in whole patches,
    `pose_strength` [B], and the pose's text and CLIP tokens `pose_context` and `pose_picture`."""
    tensors = _text(config, call)
    batch = len(tensors["context"])
    tensors["reference"] = torch.full((batch,), float(call.get("reference_strength", 1.0)))
    if (pose := call.get("pose_latents")) is None:
        return tensors
    given = {"context": call.get("context_pose"), "clip_fea": call.get("clip_fea_pose")}
    of_pose = _text(config, call | {name: value for name, value in given.items() if value is not None})
    if ("picture" in of_pose) != ("picture" in tensors):
        raise ValueError(
            "positive, negative: the pose has a CLIP vision output and the video has none, which cannot be forwarded to "
            "Parallel DiT's ranks in this version. Connect clip_vision_output too."
        )
    if of_pose["context"].shape != tensors["context"].shape:
        lengths = of_pose["context"].shape[1], tensors["context"].shape[1]
        raise ValueError(
            f"positive, negative: the pose's prompt has {lengths[0]} tokens, the video's has {lengths[1]}, which cannot be "
            "forwarded to Parallel DiT's ranks in this version. Shorten the longer one."
        )
    tensors |= {f"pose_{name}": value for name, value in of_pose.items()}
    tensors["pose"] = F.pad(pose, (0, pose.shape[-1] % 2, 0, pose.shape[-2] % 2, 0, 0), mode="circular")
    return tensors | {"pose_strength": torch.full((batch,), float(call.get("pose_strength", 1.0)))}


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    """ValueError if the pose does not have the frames, rows and columns of the latent's whole patches."""
    if "pose" not in tensors:
        return
    frames, *sides = tensors["pose"].shape[2:]
    sizes, needed = (frames + 1, *sides), (grid[0], 2 * grid[1], 2 * grid[2])
    if sizes != needed:
        present, wanted = (" x ".join(map(str, each)) for each in (sizes, needed))
        raise ValueError(
            "positive, negative: the pose video, with a frame for the reference image, is made for a latent of "
            f"{present} (frames, rows, columns), the latent_image takes {wanted}. Give both nodes the same length, width "
            "and height, and those in multiples of 16."
        )


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    block_inputs: dict[str, Any] = {"reference": step.tensors["reference"]}
    return {
        "hidden_states": step.x,
        "timestep": step.timestep,
        "encoder_hidden_states": step.tensors["context"],
        "encoder_hidden_states_image": step.tensors.get("picture"),
        "pose": step.tensors.get("pose"),  # of the first stage
        "block_inputs": block_inputs | {name: step.tensors.get(f"pose_{theirs}") for name, theirs in _OF_POSE.items()},
    }


_OF_POSE = {"text": "context", "picture": "picture", "strength": "strength"}


def _example(config: Config, _text_tokens: int) -> dict[str, torch.Tensor]:
    """The text takes the place of CLIP's picture, too."""
    context = torch.randn(1, 2 * PROMPT, config["text_dim"])
    return {"context": context, "pose_context": context, "reference": torch.ones(1), "pose_strength": torch.ones(1)}


def _cut(turns: torch.Tensor, rows: Any) -> torch.Tensor:
    return rows.of_image(turns, 1)


_CUT_BY_TOKENS: dict[str, ArgumentCut] = dict.fromkeys(("rotary_emb", "pose_rotary_emb", "reference"), _cut)
_COLUMNS = [f"{attention}.to_{part}" for attention in ("attn1", "attn2") for part in "qkv"]
_NORMS = [f"{attention}.norm_{part}" for attention in ("attn1", "attn2") for part in "qk"]
_TEXT_KEYS = [f"*.attn2.{name}" for name in ("to_k", "to_v", "norm_k", "add_k_proj", "add_v_proj", "norm_added_k")]
"""Kept for a call, not for the whole run, since all blocks' together are large: 0.4 GB in a Wan of 14 B."""

WAN_ANIMATE_2 = Family(
    name="wan-animate-2",
    model_class="WanAnimate2",
    class_module="parallel_backend.families.models.wan_animate_2",
    native_classes=("WAN_Animate2",),
    file=FileLayout(
        detect=_detect,
        configure=_configure,
        key_map=_key_map,
        header=HeaderConfig(_HEADER, others=False, takes=lambda header: header.get("model_type") == KIND),
        ignored=(r".*\.norm_added_q\.weight",),
    ),
    blocks=Blocks(
        lists=(
            BlockList("blocks", returns=("image",), attention={"attn1": PAIRED}, values_first=False, cuts=_CUT_BY_TOKENS),
        ),
        counts=lambda config: {"blocks": config["num_layers"]},
        prologue=("patch_embedding",),
        epilogue=("norm_out", "proj_out"),
        native=None,  # a replaced block would skip the pose's stream too
        native_patches=("attn1_patch", "attn2_patch", "double_block"),
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        hidden=lambda config: 2 * hidden(config),
        max_side=lambda config: config["rope_max_seq_len"],
    ),
    inputs=Inputs(
        conditioning=_conditioning,
        check_grid=_check_grid,
        accepts=("clip_fea", "pose_latents", "context_pose", "clip_fea_pose", "pose_strength", "reference_strength"),
        vector_tensors=("context", "picture", "reference", *(f"pose_{theirs}" for theirs in _OF_POSE.values())),
        example=_example,
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        cached_modules=cached(
            call=("condition_embedder", "condition_embedder.text_embedder", *_TEXT_KEYS), prompt=("rope",)
        ),
    ),
    half_dtypes=lambda _config: ("fp16", "bf16"),
    tensor_plan={
        "blocks": {
            **dict.fromkeys([*_COLUMNS, "attn2.add_k_proj", "attn2.add_v_proj"], COLUMN_BY_HEADS),
            **dict.fromkeys([*_NORMS, "attn2.norm_added_k"], NORM_BY_HEADS),  # over all heads together
            **dict.fromkeys(("attn1.to_out.0", "attn2.to_out.0"), ROW_BY_HEADS),
            "ffn.net.0.proj": COLUMN,
            "ffn.net.2": ROW,
        }
    },
    patching=Patching(video=True),
    native_values=lambda config: {"dim": hidden(config), "num_heads": config["num_attention_heads"]},
)
