"""HiDream-I1, and E1, which has a picture to change: double blocks, then single ones, with experts in each feed-forward.

Joint sequence [image, text]. E1's picture lies to the right of the latent. The text is T5's tokens, those of Llama's last
layer, and in each block the tokens of one of Llama's layers, which enter from the conditioning and are dropped after the
block. Key layout: HiDream's, which diffusers' HiDreamImageTransformer2DModel has too. The forward is models/hidream.py.
Which tokens go to which expert is known on the device alone, so in each block the host waits for it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange

from .base.blocks import JOINT, BlockList, Blocks, Values
from .base.family import Family, Forward, Inputs, Sizes, TimeEmbed, cached
from .base.file_layout import FileLayout, Source
from .base.patching import Patching
from .base.segments import image_then_text
from .base.step_inputs import REFERENCE_POSITIONS, REFERENCES, Config, Shapes, StepInputs
from .base.tensor_plan import COLUMN, COLUMN_BY_HEADS, GATHER, NORM_BY_HEADS, ROW, ROW_BY_HEADS, LayerCut
from .parts.conditioning import count_blocks, text_and_pooled
from .parts.key_map import WEIGHT, KeyMap

NAME = "HiDream"
DOUBLE, SINGLE, PROJECTIONS = "double_stream_blocks", "single_stream_blocks", "caption_projection"
HEAD = 128
"""Width of a head. Norms are taken over all heads, so the weights do not show it."""
LLAMA_LAYERS = 32
EXPERTS = 4
PATCHING = Patching()
_FEED_FORWARD = ("w1", "w2", "w3")
_EXPERTS = (*(f"experts.{index}" for index in range(EXPERTS)), "shared_experts")


def _configure(shapes: Shapes) -> Config:
    width = shapes["x_embedder.proj.weight"][0]
    channels = shapes["x_embedder.proj.weight"][1] // 4
    if (experts := shapes[f"{SINGLE}.0.block.ff_i.gate.weight"][0]) != EXPERTS:
        raise ValueError(f"model_name: this HiDream has {experts} experts, where this version computes {EXPERTS}.")
    double, single = (count_blocks(shapes, f"{name}.") for name in (DOUBLE, SINGLE))
    return {
        "patch_size": 2,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // 4,
        "num_layers": double,
        "num_single_layers": single,
        "attention_head_dim": HEAD,
        "num_attention_heads": width // HEAD,
        "caption_channels": tuple(shapes[f"{PROJECTIONS}.{index}.linear.weight"][1] for index in (double + single, 0)),
        "text_emb_dim": shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
        "num_routed_experts": EXPERTS,
        "num_activated_experts": 2,
        "axes_dims_rope": (HEAD // 2, HEAD // 4, HEAD // 4),
        "max_resolution": (128, 128),
        "llama_layers": tuple(min(index, LLAMA_LAYERS - 1) for index in range(double + single)),
    }


def _key_map(config: Config) -> dict[str, Source]:
    total = config["num_layers"] + config["num_single_layers"]
    if config["num_routed_experts"] != EXPERTS or len(config["llama_layers"]) != total or config["patch_size"] != 2:
        raise ValueError("model_name: this HiDream has other experts, layers of text or patches than this version computes.")
    keys = KeyMap()
    keys.same(*(f"t_embedder.timestep_embedder.linear_{index}" for index in (1, 2)))
    keys.same(*(f"p_embedder.pooled_embedder.linear_{index}" for index in (1, 2)))
    keys.same("x_embedder.proj", "final_layer.linear", "final_layer.adaLN_modulation.1")
    keys.same(*(f"{PROJECTIONS}.{index}.linear" for index in range(total + 1)), parameters=WEIGHT)
    for name, ends in ((DOUBLE, ("", "_t")), (SINGLE, ("",))):
        for index in range(config["num_layers" if name == DOUBLE else "num_single_layers"]):
            block = keys.inside(f"{name}.{index}.block.", f"{name}.{index}.block.")
            block.same("adaLN_modulation.1", *(f"attn1.to_{part}{end}" for part in ("q", "k", "v", "out") for end in ends))
            block.same(*(f"attn1.{part}_rms_norm{end}" for part in "qk" for end in ends), parameters=WEIGHT)
            block.same("ff_i.gate", parameters=WEIGHT)
            groups = [f"ff_i.{expert}" for expert in _EXPERTS] + ["ff_t"] * (name == DOUBLE)
            block.same(*(f"{group}.{layer}" for group in groups for layer in _FEED_FORWARD), parameters=WEIGHT)
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`context`: T5's tokens, then Llama's last layer twice; the second time stands for the layer that each block inserts.
    `llama` [B, layers, T, w]: all of Llama's layers. `pooled`, and the tensors of `reference_picture`.
    """
    width = config["caption_channels"]
    tensors = text_and_pooled(NAME, "QuadrupleCLIPLoader", (width[0], config["text_emb_dim"]), call)
    llama, layers = call.get("encoder_hidden_states_llama3"), max(config["llama_layers"]) + 1
    if llama is None or llama.ndim != 4 or llama.shape[1] < layers or llama.shape[-1] != width[1]:
        present = "none" if llama is None else f"one of {list(llama.shape)}"
        raise ValueError(
            f"positive, negative: {NAME} needs Llama's text, [batch, {layers} layers, tokens, {width[1]}], and this "
            f"conditioning has {present}. Encode the prompt with a QuadrupleCLIPLoader that has Llama 3.1."
        )
    last = llama[:, config["llama_layers"][-1]]
    tensors |= {"context": torch.cat((tensors["context"], last, last), dim=1), "llama": llama[:, :layers]}
    picture = call.get("image_cond")
    return tensors if picture is None else tensors | reference_picture(picture, call["latent"][-1])


def reference_picture(picture: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """Conditioning tensors of a picture [B, C, H, W] to the right of a latent of this width. ValueError for an odd width."""
    if width % 2:
        raise ValueError(f"latent_image: beside a picture this model takes latents of even width, this one's is {width}.")
    rows, columns = PATCHING.grid(tuple(picture.shape))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)) + width // 2)
    positions = places.expand(len(picture), -1, -1).to(picture.device)
    return {REFERENCES: PATCHING.pack(picture), REFERENCE_POSITIONS: positions}


def _example(config: Config, text_tokens: int) -> dict[str, torch.Tensor]:
    width, layers = config["caption_channels"][0], max(config["llama_layers"]) + 1
    return {
        "context": torch.randn(1, 3 * text_tokens, width),
        "pooled": torch.randn(1, config["text_emb_dim"]),
        "llama": torch.randn(1, layers, text_tokens, width),
    }


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    llama = step.tensors["llama"]
    words = llama.shape[2]
    of_t5 = step.text_tokens - 2 * words
    t5, last, inserted = step.text.before(of_t5), step.text.after(of_t5).before(words), step.text.after(of_t5 + words)
    context = step.tensors.get("context")
    if context is None:  # later stages read its shape only
        context = llama.new_zeros(len(llama), 1, 1).expand(-1, len(step.text), llama.shape[-1])
    context = context[:, : len(t5) + len(last)]
    return {
        "hidden_states": None if step.x is None else rearrange(step.x, "b n (c p) -> b n (p c)", p=4),
        "timesteps": step.timestep,
        "pooled_embeds": step.tensors["pooled"],
        "encoder_hidden_states_t5": context[:, : len(t5)],
        "encoder_hidden_states_last": context[:, len(t5) :],
        "encoder_hidden_states_llama3": llama[:, :, inserted.slice],
        "image_positions": step.positions()[:, 1:],
    }


def _plan(streams: tuple[str, ...], groups: tuple[str, ...]) -> dict[str, LayerCut]:
    return {
        **{f"block.attn1.to_{part}{end}": COLUMN_BY_HEADS for part in "qkv" for end in streams},
        **{f"block.attn1.{part}_rms_norm{end}": NORM_BY_HEADS for part in "qk" for end in streams},
        **{f"block.attn1.to_out{end}": ROW_BY_HEADS for end in streams},
        **{f"block.{group}.{layer}": COLUMN for group in groups for layer in ("w1", "w3")},
        **{f"block.{group}.w2": ROW for group in groups},
        "block.adaLN_modulation.1": GATHER,
    }


_OF_IMAGE = tuple(f"ff_i.{expert}" for expert in _EXPERTS)
ATTENTION = {"block.attn1": JOINT}
VALUES = Values(text="to_v_t", image_argument="norm_hidden_states", text_argument="norm_encoder_hidden_states")


class _Inputs(Inputs):
    def references(self, call: Mapping[str, Any]) -> list[torch.Tensor]:
        return [] if call.get("image_cond") is None else [call["image_cond"]]


class _Forward(Forward):
    untraced = ("block.ff_i",)  # experts: the number of tokens of each depends on values


HIDREAM = Family(
    name="hidream-i1",
    model_class="HiDreamImageTransformer2DModel",
    class_module="parallel_backend.families.models.hidream",
    native_classes=("HiDream",),
    file=FileLayout(
        detect=lambda shapes: f"{PROJECTIONS}.0.linear.weight" in shapes and f"{SINGLE}.0.block.ff_i.gate.weight" in shapes,
        configure=_configure,
        key_map=_key_map,
    ),
    blocks=Blocks(
        lists=(
            BlockList(DOUBLE, returns=("image", "text"), attention=ATTENTION, values=VALUES),
            BlockList(SINGLE, returns=("image",), joined=True, attention=ATTENTION),
        ),
        counts=lambda config: {DOUBLE: config["num_layers"], SINGLE: config["num_single_layers"]},
        prologue=("x_embedder",),
        epilogue=("final_layer",),
        text_first=False,
        segments=image_then_text,
    ),
    sizes=Sizes(latent_channels=lambda config: config["in_channels"]),
    inputs=_Inputs(
        conditioning=_conditioning,
        accepts=("y", "encoder_hidden_states_llama3", "image_cond"),
        token_tensors=("context",),
        vector_tensors=("pooled", "llama"),
        example=_example,
    ),
    forward=_Forward(
        arguments=_arguments,
        time_embed=TimeEmbed("t_embedder"),
        output=lambda tokens: -rearrange(tokens, "b n (p c) -> b n (c p)", p=4),
        cached_modules=cached(
            call=("t_embedder", "*.block.adaLN_modulation", "final_layer.adaLN_modulation"),
            prompt=("p_embedder",),
            band=("pe_embedder", f"{PROJECTIONS}.*"),
        ),
    ),
    tensor_plan={
        DOUBLE: _plan(("", "_t"), (*_OF_IMAGE, "ff_t")),
        SINGLE: _plan(("",), _OF_IMAGE),
        PROJECTIONS: {"linear": GATHER},
    },
    patching=PATCHING,
)
