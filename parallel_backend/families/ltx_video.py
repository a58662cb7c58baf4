"""LTX-Video 0.9 to 0.9.8, 2B and 13B: text and pictures to video, with keyframes after the video's frames.

Text is read by cross-attention and is no part of the sequence. The class takes tokens and their coordinates in pixels.
Key layouts: Lightricks' (which ComfyUI's files use) and diffusers' LTXVideoTransformer3DModel.
"""

from typing import Any

import torch

from parallel_backend.core.spans import Span

from .base.blocks import Blocks
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, HeaderConfig, Source, header_arguments
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import TABLE_BY_HEADS
from .parts.conditioning import count_blocks, text
from .parts.cross_attention import TEXT_KEYS, block_list, block_plan
from .parts.key_map import WEIGHT, KeyMap
from .parts.ltx import FRAME_RATE, PIXELS, TIME, Patchifier

HEADS = 32
"""Attention heads of every model of this family. Nothing in the weights shows it."""
SMALL = 28
"""Blocks of the 2B models. Early 2B models count frames differently (`causal_temporal_positioning` in a file's header)."""
BLOCKS = "transformer_blocks"

PATCHING = Patching(side=1, video=True)

HEADER = HeaderConfig(  # what ComfyUI's LTXVModel reads, without `settings`
    values={
        **header_arguments("in_channels", "attention_head_dim", "cross_attention_dim", "caption_channels", "num_layers"),
        "image_model": lambda _config: ("ltxv",),
        "num_attention_heads": lambda _config: (HEADS,),
        "positional_embedding_theta": lambda _config: (10000.0,),
        "positional_embedding_max_pos": lambda _config: ((20, 2048, 2048),),
        "vae_scale_factors": lambda _config: (PIXELS,),
        "use_middle_indices_grid": lambda _config: (False,),
        "timestep_scale_multiplier": lambda _config: (TIME,),
        "rope_type": lambda _config: ("interleaved",),
        "frequencies_precision": lambda _config: ("float32",),
        "caption_proj_before_connector": lambda _config: (False,),
        "caption_projection_first_linear": lambda _config: (True,),
        "cross_attention_adaln": lambda _config: (False,),
        "use_prompt_adaln_single": lambda _config: (True,),
        "use_keyframes_abs_pos_embedding": lambda _config: (False,),
        "ff_bias": lambda _config: (True,),
    },
    others=True,
)
_OUTSIDE = {  # diffusers module <- original module
    "proj_in": "patchify_proj",
    "time_embed.emb.timestep_embedder.linear_1": "adaln_single.emb.timestep_embedder.linear_1",
    "time_embed.emb.timestep_embedder.linear_2": "adaln_single.emb.timestep_embedder.linear_2",
    "time_embed.linear": "adaln_single.linear",
}
_SAME = ("to_q", "to_k", "to_v", "to_out.0")


def _configure(shapes: Shapes) -> Config:
    width, channels = shapes["patchify_proj.weight"]
    return {
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_attention_heads": HEADS,
        "attention_head_dim": width // HEADS,
        "cross_attention_dim": shapes[f"{BLOCKS}.0.attn2.to_k.weight"][1],
        "num_layers": count_blocks(shapes, f"{BLOCKS}."),
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE)
    keys.same("caption_projection.linear_1", "caption_projection.linear_2", "proj_out")
    keys.tensor("scale_shift_table")
    for block in keys.each(BLOCKS, BLOCKS, config["num_layers"]):
        block.tensor("scale_shift_table")
        block.same("ff.net.0.proj", "ff.net.2")
        for attention in (block.inside("attn1.", "attn1."), block.inside("attn2.", "attn2.")):
            attention.same(*_SAME)
            attention.copy({"norm_q": "q_norm", "norm_k": "k_norm"}, WEIGHT)
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context` [B, T, caption_channels], `frame_rate` [B], `mask` [B, T] bool (text that may be seen), and `keyframes`
    [B, 3, K, 2], pixel bounds of the last K tokens. ValueError for guides with attention weights.

    ComfyUI has already made the timesteps from `denoise_mask`. Values below zero in it mark tokens that are left out.
    """
    context = text("LTX-Video", config["caption_channels"], call)
    tensors = {"context": context, "frame_rate": torch.full((len(context),), float(call.get("frame_rate", FRAME_RATE)))}
    if (mask := call.get("attention_mask")) is not None:
        if mask.is_floating_point():
            raise ValueError("positive, negative: a text mask of weights cannot be forwarded. Use one of zeros and ones.")
        tensors["mask"] = mask.reshape(len(context), -1).bool()
    if (keyframes := call.get("keyframe_idxs")) is not None and keyframes.shape[2]:
        for guide in call.get("guide_attention_entries") or ():
            if guide["strength"] != 1.0 or guide["pixel_mask"] is not None:
                raise ValueError(
                    "positive, negative: a guide with a mask, or a strength other than 1, cannot be forwarded to Parallel "
                    "DiT's ranks in this version. Use a strength of 1 and no mask in LTXVAddGuide."
                )
        if (call["denoise_mask"] < 0).any():
            raise ValueError(
                "positive, negative: a guide of a lower resolution (IC-LoRA) cannot be forwarded to Parallel DiT's ranks in "
                "this version. Use one of the video's own size."
            )
        tensors["keyframes"] = keyframes
    return tensors


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    return {"context": torch.randn(1, text_tokens, config["caption_channels"]), "frame_rate": torch.full((1,), FRAME_RATE)}


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    places = step.of_tokens("places", step.places_in_class)
    time = TIME * step.timestep
    if time.ndim > 1:  # of each token
        time = time.flatten(1)[:, places]
    # Without a prologue only the number of tokens counts.
    x = time.new_zeros(1, 1, 1).expand(len(time), len(places), 1) if step.x is None else step.x
    return {
        "hidden_states": x,
        "encoder_hidden_states": step.tensors["context"],
        "encoder_attention_mask": step.tensors.get("mask"),
        "timestep": time,
        "video_coords": _coordinates(step, config["causal_temporal_positioning"]),
    }


def _coordinates(step: StepInputs, causal: bool) -> torch.Tensor:
    """[b, 3, n] float32: second, pixel row and pixel column of the rank's tokens (comfy/ldm/lightricks/model.py).

    `causal`: the first latent frame stands for one frame of the video, as in LTX-Video 0.9.5 and later.
    """

    def of_video(image: Span) -> torch.Tensor:
        pixels = torch.stack(torch.unravel_index(step.places_in_class(image), step.grid)) * torch.tensor(PIXELS)[:, None]
        if causal:
            pixels[0] = (pixels[0] + 1 - PIXELS[0]).clamp(min=0)
        return pixels.float()

    pixels = step.of_tokens("pixels", of_video).repeat(len(step.timestep), 1, 1)
    if (keyframes := step.tensors.get("keyframes")) is not None:
        first = step.token_order.image - keyframes.shape[2]
        rows = step.of_tokens("keyframe rows", lambda image: (step.places_in_class(image) >= first).nonzero()[:, 0])
        numbers = step.of_tokens("places", step.places_in_class)[rows] - first
        pixels[:, :, rows] = keyframes[:, :, numbers, 0].float()
    pixels[:, 0] /= step.tensors["frame_rate"][:, None]
    return pixels


LTX_VIDEO = Family(
    name="ltx-video",
    model_class="LTXVideoTransformer3DModel",
    native_classes=("LTXV",),
    file=FileLayout(
        detect=lambda shapes: (
            {"patchify_proj.weight", "adaln_single.linear.weight"} <= shapes.keys()
            and "audio_adaln_single.linear.weight" not in shapes
        ),
        configure=_configure,
        key_map=_key_map,
        header=HEADER,
        settings={"causal_temporal_positioning": lambda config: config["num_layers"] > SMALL},
    ),
    blocks=Blocks(
        lists=(block_list(BLOCKS),),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("proj_in",),
        epilogue=("norm_out", "proj_out"),
        native={"double_block": BLOCKS},
        segments=text_then_image,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=("attention_mask", "frame_rate", "keyframe_idxs", "guide_attention_entries", "denoise_mask"),
        vector_tensors=("context", "mask", "frame_rate", "keyframes"),
        exact=("frame_rate", "keyframes"),
        example=_example,
    ),
    forward=Forward(
        arguments=_arguments,
        cached_modules=cached(prompt=("caption_projection",), band=("rope",)) | TEXT_KEYS,
    ),
    tensor_plan={BLOCKS: block_plan("ff"), "rope": {"": TABLE_BY_HEADS}},
    patching=PATCHING,
    native_values=lambda _config: {"patchifier": Patchifier(PATCHING)},
)
