"""Krea 2: text fused out of twelve layers of its encoder, then single-stream blocks; joint sequence [text, image].

Keys and values have fewer heads than queries. All blocks share one modulation, to which each adds a table. Norms scale by
1 + weight. Reference pictures are used only if the call names a method for them, as in ComfyUI's class. Key layouts: Krea's
(which ComfyUI's files use) and diffusers' Krea2Transformer2DModel.
"""

from typing import Any

import torch

from .base.blocks import BlockList, Blocks, Projections
from .base.family import Family, Forward, Inputs, Sizes, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import text_then_image
from .base.step_inputs import REFERENCES_AT_ZERO, Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, COLUMN_BY_KEY_HEADS, ROW, ROW_BY_HEADS
from .parts.conditioning import count_blocks, text
from .parts.key_map import WEIGHT, KeyMap
from .parts.references import ACCEPTS, AT_ZERO, reference_tensors

BLOCKS, PATCHING = "transformer_blocks", Patching(video=True)
_SCALE = {"weight": "scale"}
_LAYERWISE, _REFINERS = "layerwise_blocks", "refiner_blocks"
_LAYERS = {  # diffusers layer <- original layer
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_gate": "attn.gate",
    "attn.to_out.0": "attn.wo",
    "ff.gate": "mlp.gate",
    "ff.up": "mlp.up",
    "ff.down": "mlp.down",
}
_NORMS = {
    "norm1": "prenorm",
    "norm2": "postnorm",
    "attn.norm_q": "attn.qknorm.qnorm",
    "attn.norm_k": "attn.qknorm.knorm",
}
_OUTSIDE = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "final_layer.linear": "last.linear",
}
_PLAN = {
    **dict.fromkeys(("attn.to_q", "attn.to_gate"), COLUMN_BY_HEADS),
    **dict.fromkeys(("attn.to_k", "attn.to_v"), COLUMN_BY_KEY_HEADS),
    "attn.to_out.0": ROW_BY_HEADS,
    **dict.fromkeys(("ff.gate", "ff.up"), COLUMN),
    "ff.down": ROW,
}


def _configure(shapes: Shapes) -> Config:
    block, words = "blocks.0.", f"txtfusion.{_LAYERWISE}.0."
    (head,), (text_head,) = (shapes[f"{each}attn.qknorm.qnorm.scale"] for each in (block, words))
    width, channels = shapes["first.weight"]
    text_width = shapes["txtmlp.0.scale"][0]
    return {
        "in_channels": channels,
        "num_layers": count_blocks(shapes, "blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "num_key_value_heads": shapes[f"{block}attn.wk.weight"][0] // head,
        "intermediate_size": shapes[f"{block}mlp.down.weight"][1],
        "timestep_embed_dim": shapes["tmlp.0.weight"][1],
        "text_hidden_dim": text_width,
        "num_text_layers": shapes["txtfusion.projector.weight"][1],
        "text_num_attention_heads": text_width // text_head,
        "text_num_key_value_heads": shapes[f"{words}attn.wk.weight"][0] // text_head,
        "text_intermediate_size": shapes[f"{words}mlp.down.weight"][1],
        "num_layerwise_text_blocks": count_blocks(shapes, f"txtfusion.{_LAYERWISE}."),
        "num_refiner_text_blocks": count_blocks(shapes, f"txtfusion.{_REFINERS}."),
        "axes_dims_rope": (head - 12 * (head // 16), 6 * (head // 16), 6 * (head // 16)),
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys = KeyMap()
    keys.copy(_OUTSIDE)
    keys.copy({"text_fusion.projector": "txtfusion.projector"}, WEIGHT)
    keys.copy({"txt_in.norm": "txtmlp.0", "final_layer.norm": "last.norm"}, _SCALE)
    keys.tensor("final_layer.scale_shift_table", "last.modulation.lin")
    lists = {
        (BLOCKS, "blocks"): config["num_layers"],
        (f"text_fusion.{_LAYERWISE}", f"txtfusion.{_LAYERWISE}"): config["num_layerwise_text_blocks"],
        (f"text_fusion.{_REFINERS}", f"txtfusion.{_REFINERS}"): config["num_refiner_text_blocks"],
    }
    for (ours, theirs), count in lists.items():
        for block in keys.each(ours, theirs, count):
            block.copy(_LAYERS, WEIGHT)
            block.copy(_NORMS, _SCALE)
            if ours == BLOCKS:
                block.tensor("scale_shift_table", "mod.lin", flat=True)
    return keys.sources


class _Forward(Forward):
    def prepare(self, model: Any, step: StepInputs) -> None:
        """Replaces forwards: the whole text is fused on each rank that has it, and then cut to the rank's tokens; the last
        layer gets the modulation for the sampler's time, without that for time 0."""
        fusion, project, last = model.text_fusion, model.txt_in, model.final_layer
        if (words := step.tensors.get("context")) is not None:
            layers = words.unflatten(-1, (model.config["num_text_layers"], -1))
            fusion.forward = lambda _text, attention_mask=None: type(fusion).forward(fusion, layers)
            project.forward = lambda fused: type(project).forward(project, fused[:, step.text.slice])
        last.forward = lambda tokens, embedded: type(last).forward(last, tokens, embedded[: len(tokens)])

    def float32(self, config: Config) -> tuple[str, ...]:
        """Norms, whose 1 + weight diffusers adds in float32."""
        return tuple(f".{norm}.weight" for norm in ("norm", "norm1", "norm2", "norm_q", "norm_k"))


def _modulation(modulation: torch.Tensor, step: StepInputs) -> torch.Tensor:
    """[b, 1, c] unchanged; [2 b, 1, c], for the sampler's time and for time 0 -> [b, n, c], for each token's time."""
    references = step.at_zero()
    if references is None:
        return modulation
    sampler_time, zero = modulation.chunk(2)
    at_zero = torch.cat((references.new_zeros(len(step.text)), references))
    return torch.where(at_zero[None, :, None], zero, sampler_time)


def _arguments(step: StepInputs, _config: Config) -> dict[str, Any]:
    positions = step.positions()
    return {
        "hidden_states": step.image_tensor(),
        "encoder_hidden_states": step.zeros(len(step.text)),  # `prepare` has the text; the forward reads its length
        "timestep": step.times,
        "position_ids": torch.cat((positions.new_zeros(len(step.text), 3), positions)),
    }


def _text_width(config: Config) -> int:
    return config["num_text_layers"] * config["text_hidden_dim"]


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {"context": text("Krea 2", _text_width(config), call)}
    method = call.get("ref_latents_method")
    if method is None:
        return tensors
    method = AT_ZERO if method == AT_ZERO else "index"  # the two methods of ComfyUI's class
    return tensors | reference_tensors(PATCHING, call | {"ref_latents_method": method}, method, methods=(method,))


def _check_grid(grid: tuple[int, ...], _tensors: dict[str, torch.Tensor]) -> None:
    """The latent has an axis of frames, of which the model makes one."""
    if grid[0] > 1:
        raise ValueError(
            f"latent_image: the latent has {grid[0]} frames, this model makes 1. Use its own Empty Latent node."
        )


KREA2 = Family(
    name="krea2",
    model_class="Krea2Transformer2DModel",
    native_classes=("Krea2",),
    fused_module="parallel_backend.families.models.fused_krea2",
    file=FileLayout(
        detect=lambda shapes: "txtfusion.projector.weight" in shapes and "blocks.0.mod.lin" in shapes,
        configure=_configure,
        key_map=_key_map,
    ),
    blocks=Blocks(
        lists=(
            BlockList(BLOCKS, returns=("image",), joined=True, by_token={"temb": _modulation}, projections=Projections()),
        ),
        counts=lambda config: {BLOCKS: config["num_layers"]},
        prologue=("img_in", "text_fusion", "txt_in"),
        epilogue=("final_layer",),
        native_patches=("attn1_patch", "attn1_output_patch", "post_input"),
        segments=text_then_image,
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"] // 4,
        key_heads=lambda config: config["num_key_value_heads"],
    ),
    inputs=Inputs(
        conditioning=_conditioning,
        accepts=ACCEPTS,
        token_tensors=("context",),
        whole_text=True,
        vector_tensors=(REFERENCES_AT_ZERO,),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, _text_width(config))},
        check_grid=_check_grid,
    ),
    forward=_Forward(
        arguments=_arguments,
        cached_modules=cached(call=("time_embed", "time_mod_proj"), prompt=("text_fusion",), band=("rotary_emb",)),
    ),
    half_dtypes=lambda _config: ("bf16", "fp16"),
    tensor_plan={BLOCKS: _PLAN},
    patching=PATCHING,
)
