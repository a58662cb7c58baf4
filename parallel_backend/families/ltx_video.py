"""LTX-Video 0.9 to 0.9.8, 2B and 13B: text and pictures to video, with keyframes behind the video's own frames.

Text is read by cross attention, and no part of the sequence. The class takes tokens and their coordinates in pixels.
Key layouts: Lightricks' (which ComfyUI's files use) and diffusers' LTXVideoTransformer3DModel.
"""

from typing import Any

from parallel_backend.families.base.family import Family, Source
from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import Config, Shapes, StepInputs
from parallel_backend.families.base.tensor_plan import TABLE_BY_HEADS
from parallel_backend.families.parts.conditioning import count_blocks
from parallel_backend.families.parts.cross_attention import block_list, block_plan
from parallel_backend.families.parts.key_map import Keys

from . import ltx_inputs

HEADS = 32
"""In every model of this family; nothing in the weights shows it."""
SMALL = 28
"""Blocks of the 2B models, of which some count frames otherwise than the others; a file's header says which do."""
TIME = 1000.0
"""Between ComfyUI's sigma and the model's timestep."""
BLOCKS = "transformer_blocks"

PATCHING = Patching(side=1, video=True, along="frames")
"""A token is 32 x 32 pixels, so there are more frames than rows; in bands of frames tokens lie as the class has them."""

_OUTSIDE = {  # diffusers module <- original module
    "proj_in": "patchify_proj",
    "time_embed.emb.timestep_embedder.linear_1": "adaln_single.emb.timestep_embedder.linear_1",
    "time_embed.emb.timestep_embedder.linear_2": "adaln_single.emb.timestep_embedder.linear_2",
    "time_embed.linear": "adaln_single.linear",
}
_SAME = ("to_q", "to_k", "to_v", "to_out.0")


def _detect(shapes: Shapes) -> bool:
    return "patchify_proj.weight" in shapes and "adaln_single.linear.weight" in shapes


def _configure(shapes: Shapes) -> Config:
    if "audio_adaln_single.linear.weight" in shapes:
        raise ValueError("model_name: this is LTX-2 with sound, which this version cannot run. Use an LTX-Video model.")
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


def _recipe(config: Config) -> dict[str, Source]:
    keys = Keys()
    keys.copy(_OUTSIDE)
    keys.same("caption_projection.linear_1", "caption_projection.linear_2", "proj_out")
    keys.tensor("scale_shift_table")
    for index in range(config["num_layers"]):
        block = keys.inside(f"{BLOCKS}.{index}.", f"{BLOCKS}.{index}.")
        block.tensor("scale_shift_table")
        block.same("ff.net.0.proj", "ff.net.2")
        for attention in (block.inside("attn1.", "attn1."), block.inside("attn2.", "attn2.")):
            attention.same(*_SAME)
            attention.copy({"norm_q": "q_norm", "norm_k": "k_norm"}, ("weight",))
    return keys.sources


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    places = step.stream.places(step.image).to(step.timestep.device)
    time = TIME * step.timestep
    if time.ndim > 1:  # of each token
        time = time.flatten(1)[:, places]
    # Where there is no prologue only the number of tokens counts.
    x = time.new_zeros(1, 1, 1).expand(len(time), len(places), 1) if step.x is None else step.x
    return {
        "hidden_states": x,
        "encoder_hidden_states": step.tensors["context"],
        "encoder_attention_mask": step.tensors.get("mask"),
        "timestep": time,
        "video_coords": ltx_inputs.coordinates(step, places, config["causal_temporal_positioning"]),
    }


LTX_VIDEO = Family(
    name="ltx-video",
    model_class="LTXVideoTransformer3DModel",
    block_lists=(block_list(BLOCKS, cuts={}),),
    prologue=("proj_in",),
    epilogue=("norm_out", "proj_out"),
    token_tensors=(),
    vector_tensors=("context", "mask", "frame_rate", "keyframes"),
    time_embed=None,
    latent_channels=lambda config: config["in_channels"],
    blocks=lambda config: {BLOCKS: config["num_layers"]},
    tensor_plan={BLOCKS: block_plan("ff"), "rope": {"": TABLE_BY_HEADS}},
    detect=_detect,
    configure=_configure,
    recipe=_recipe,
    arguments=_arguments,
    conditioning=ltx_inputs.conditioning,
    example=ltx_inputs.example,
    native_values=lambda _config: {"patchifier": ltx_inputs.Patchifier(PATCHING)},
    patching=PATCHING,
    accepts=ltx_inputs.ACCEPTS,
    exact=("frame_rate", "keyframes"),
    settings={"causal_temporal_positioning": lambda config: config["num_layers"] > SMALL},
)
