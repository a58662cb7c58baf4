"""Z-Image and Z-Image-Turbo: refiners for image and caption, then single-stream blocks; joint sequence [image, text].

Key layouts: Tongyi's, with attention fused as in Lumina 2 (which ComfyUI's files use), and diffusers'
ZImageTransformer2DModel. The class pads the image's and the caption's tokens to multiples of 32.
"""

from dataclasses import replace
from typing import Any

import torch

from .base.blocks import IMAGE, JOINT, BlockList, Blocks
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.step_inputs import Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, ROW, ROW_BY_HEADS
from .parts import next_dit
from .parts.epsilons import UNNAMED
from .parts.key_map import WEIGHT, KeyMap

MULTIPLE = 32
MODULATION = "adaLN_modulation.0"

_OUTSIDE = {  # diffusers module <- original module
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1.linear": "final_layer.linear",
    "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
}
_FEED_FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
_NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
_PLAN = {
    **dict.fromkeys(("attention.to_q", "attention.to_k", "attention.to_v"), COLUMN_BY_HEADS),
    "attention.to_out.0": ROW_BY_HEADS,
    **dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), COLUMN),
    "feed_forward.w2": ROW,
}


class _Inputs(Inputs):
    def padded(self, tokens: int) -> int:
        """The class attends to its padding tokens, so their number changes the result."""
        return tokens + -tokens % MULTIPLE


def _configure(shapes: Shapes) -> Config:
    size = next_dit.sizes(shapes)
    rows = size["head"] * 3 // 8 // 2 * 2  # rotary axes are (32, 48, 48) of a head's 128
    return {
        "in_channels": size["channels"],
        "dim": size["width"],
        "n_layers": size["layers"],
        "n_refiner_layers": size["refiners"],
        "n_heads": size["heads"],
        "n_kv_heads": size["key_heads"],
        "cap_feat_dim": size["caption"],
        "axes_dims": (size["head"] - 2 * rows, rows, rows),
        "axes_lens": next_dit.AXES_LENS,
    }


def _key_map(config: Config) -> dict[str, Source]:
    keys, width = KeyMap(), config["dim"]
    keys.copy(_OUTSIDE)
    keys.same("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1")
    keys.same("cap_embedder.0", parameters=WEIGHT)
    keys.tensor("x_pad_token")
    keys.tensor("cap_pad_token")
    for name, block in next_dit.block_keys(keys, config["n_layers"], config["n_refiner_layers"], "attention", width, width):
        block.same(*_FEED_FORWARD, *_NORMS, parameters=WEIGHT)
        if name != next_dit.CONTEXT:
            block.same(MODULATION)
    return keys.sources


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    # The image's padding counts as text of the stream, but is no part of the caption: the class adds it itself.
    words = replace(step, text_tokens=step.text_tokens - Z_IMAGE.image_padding(step.grid))
    return {
        "x": list(step.image_tensor().unsqueeze(2).unbind()),
        "t": step.timestep,
        "cap_feats": list(words.text_tensor("context", config["cap_feat_dim"]).unbind()),
    }


def _joined(name: str, over: str, prologue: bool = False) -> BlockList:
    return BlockList(
        name,
        returns=("image",),
        image="x",
        joined=True,
        cuts={"freqs_cis": lambda table, rows: rows.of_joint(table, 1)},
        attention={"attention": over},
        prologue=prologue,
    )


Z_IMAGE = Family(
    name="z-image",
    model_class="ZImageTransformer2DModel",
    native_classes=("ZImage",),
    fused_module="parallel_backend.families.models.fused_z_image",
    file=FileLayout(
        detect=lambda shapes: next_dit.has_keys(shapes, MODULATION),
        configure=_configure,
        key_map=_key_map,
        ignored=next_dit.IGNORED,
        header=next_dit.HEADER,
        max_settings=next_dit.MAX_SETTINGS,
    ),
    blocks=Blocks(
        lists=(_joined(next_dit.REFINER, IMAGE, prologue=True), _joined(next_dit.MODULATED, JOINT)),
        counts=lambda config: {next_dit.MODULATED: config["n_layers"]},
        prologue=("all_x_embedder", "cap_embedder", next_dit.CONTEXT),
        epilogue=("all_final_layer",),
        text_first=False,
        residuals={"noise_refiner": next_dit.REFINER, "double_block": next_dit.MODULATED},
        native_patches=("noise_refiner", "double_block"),
    ),
    sizes=Sizes(
        latent_channels=lambda config: config["in_channels"],
        hidden=lambda config: config["dim"],
        heads=lambda config: config["n_heads"],
        head_size=lambda config: config["dim"] // config["n_heads"],
        max_side=lambda config: min(config["axes_lens"][1:]),
    ),
    inputs=_Inputs(
        conditioning=lambda config, call: next_dit.caption("Z-Image", config, (config["axes_lens"][0] - 2) // 32 * 32, call),
        accepts=next_dit.ACCEPTS,
        token_tensors=("context",),
        example=lambda config, tokens: {"context": torch.randn(1, tokens, config["cap_feat_dim"])},
    ),
    forward=Forward(
        arguments=_arguments,
        whole_latent=True,
        time_embed=TimeEmbed("t_embedder", factor=1000.0, model_time=lambda timestep: 1 - timestep),
        output=lambda images: -torch.stack(images)[:, :, 0],
        cached_modules=cached(call=("t_embedder", "*.adaLN_modulation"), prompt=("cap_embedder", f"{next_dit.CONTEXT}.*")),
    ),
    tensor_plan=next_dit.tensor_plan(_PLAN, MODULATION),
    epsilons=UNNAMED,
)
