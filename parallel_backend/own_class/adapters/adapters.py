"""What a trial cannot find out of single classes: arguments that are not sent, and blocks that take tokens in another form.

Such a block gets another `__call__`, which brings its arguments into what ranks cut: tensors with an axis of tokens.
All that is proven for other classes is proven for these.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallel_backend.core.sparse_attention import Runs
from parallel_backend.own_class.adapters.animate2_forms import animate2_arguments, animate2_block, animate2_model
from parallel_backend.own_class.adapters.ltx_forms import LTX2_FORMS, Indexed, ltx_arguments, ltx_model
from parallel_backend.own_class.adapters.minimax_forms import GATE, minimax_h3_block, minimax_h3_model, minimax_h3_segments
from parallel_backend.own_class.adapters.qwen_forms import qwen_image21_block, qwen_image21_model
from parallel_backend.own_class.adapters.seedvr_forms import check_condition, seedvr2_attention, seedvr2_block, seedvr2_model
from parallel_backend.own_class.adapters.wan_forms import (
    FREQUENCY,
    name_of_face,
    put_faces_into_blocks,
    wan_animate_block,
    wan_animate_model,
    wan_block,
    wan_model,
)
from parallel_backend.own_class.cuts.attention_calls import attention_of


@dataclass(frozen=True)
class Adapter:
    """`blocks`: name of the list. `forms`: module in a block -> the class that takes the place of its own. Empty: the block
    itself, whose new class has another `__call__`."""

    blocks: str
    forms: Mapping[str, Callable[..., type[nn.Module]]]
    unsent: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Argument that is a dictionary -> keys of objects that the class makes anew if they are missing."""
    idle: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    """Argument -> whether its value changes nothing, and is not sent."""
    model: Callable[..., type[nn.Module]] | None = None
    """As `forms`, of the model itself. None: it stays."""
    arguments: Callable[[Mapping[str, Any], Any], dict[str, Any]] | None = None
    """(a call's arguments, the class) -> those that `model` takes. None: they are the class's own."""
    stated: tuple[str, ...] = ()
    """Entries that a file's header has to have: ComfyUI's values in their place are those of no such model."""
    carries: bool = False
    """Its `forward` changes latents around its `_forward`. A call inside of wrappers has minimax_forms.INSIDE."""
    segments: Callable[..., tuple[Runs, tuple[int, ...]]] = lambda _latents, _arguments, _native: ((), ())
    """(latents, arguments, the class) -> SparseAttention's `segments` and `grid` of a call. Empty: they are unknown."""
    gate: str = ""
    """A layer that blocks may have, and that no call of the class reads. Tensor ranks have the part for their heads."""
    one_entry: bool = False
    """The class takes a batch of one alone: the client calls it for one entry after the other."""
    here: tuple[str, ...] = ()
    """Modules that only ComfyUI's process runs, for a prompt's text or for `computed`. No rank has their weights."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """Argument of a call -> method of `model` that makes of it, in ComfyUI's process, what ranks get in its place."""
    moves: Callable[[nn.Module], None] | None = None
    """Puts modules that the class runs between its blocks into these."""
    unskipped: str = ""
    """Why none of its blocks can be skipped: what the class runs all the same. Empty: a trial says it."""
    own_name: Callable[[str], str] = lambda name: name
    """Name of a parameter, moved or not -> the class's own."""
    options: tuple[str, ...] = ()
    """This pack's entries of transformer_options that `model` reads."""
    check: Callable[[tuple[int, ...], Mapping[str, Any]], None] = lambda _sizes, _arguments: None
    """(sizes of the whole latent, arguments) of a call. ValueError if the class does not take it."""
    steady: bool = False
    """See OwnLatent. A trial proves it."""


def adapter_of(kind: str) -> Adapter:
    """The adapter of a class of ComfyUI's supported_models, or one that changes nothing."""
    return ADAPTERS.get(kind, UNCHANGED)


def adapt(kind: str, model: nn.Module) -> None:
    """Bring the blocks of a model, of this class of ComfyUI's supported_models, into the form that ranks cut."""
    adapter = adapter_of(kind)
    if adapter.model is not None:
        model.__class__ = adapter.model(type(model))
    if adapter.moves is not None:
        adapter.moves(model)
    for block in model.get_submodule(adapter.blocks).children():
        for name, form in adapter.forms.items():
            module = block.get_submodule(name)
            module.__class__ = form(type(module))


def unstated(kind: str, stated: Mapping[str, Any]) -> str:
    """An entry that the header of this class's files has to have, and that is not `stated` in one. Empty: there is none."""
    return next((entry for entry in adapter_of(kind).stated if entry not in stated), "")


def sent(kind: str, arguments: Mapping[str, Any], native: Any) -> dict[str, Any]:
    """The arguments as they are sent. `native`: the class."""
    adapter = adapter_of(kind)
    named = dict(arguments) if adapter.arguments is None else adapter.arguments(arguments, native)
    for name in [name for name, is_idle in adapter.idle.items() if name in named and is_idle(named[name])]:
        del named[name]
    for name, left_out in adapter.unsent.items():
        if isinstance(value := named.get(name), dict):
            named[name] = {key: each for key, each in value.items() if key not in left_out}
    return named


def without_weights(entries: Any) -> bool:
    """Whether LTX's guides change no attention: their entries then say only how many tokens each guide has."""
    return not any(each["strength"] != 1.0 or each.get("pixel_mask") is not None for each in entries or ())


@functools.cache
def qwen_image_block(kind: type[nn.Module]) -> type[nn.Module]:
    """Qwen-Image's block, with [S] bool in place of a number: which tokens are at time 0. Ranks can cut that by tokens.

    The number is that of the first reference token; it and all tokens behind it are at time 0. transformer_options has the
    token counts of all references.
    """

    class ByToken(kind):  # type: ignore[valid-type, misc]
        def __call__(self, hidden_states, timestep_zero_index=None, **named):
            at_zero_S = rows_at_zero(timestep_zero_index, named["transformer_options"], hidden_states.device)
            return super().__call__(hidden_states=hidden_states, timestep_zero_index=at_zero_S, **named)

        def _modulate(self, x, mod_params, timestep_zero_index=None):
            if timestep_zero_index is None:
                return super()._modulate(x, mod_params)
            shift, scale, gate = by_token(mod_params[:, None], timestep_zero_index).chunk(3, dim=-1)
            return torch.addcmul(shift, x, 1 + scale), gate

        def _apply_gate(self, x, y, gate, timestep_zero_index=None):
            return torch.addcmul(y, gate, x)

    return ByToken


@functools.cache
def krea2_block(kind: type[nn.Module]) -> type[nn.Module]:
    """As `qwen_image_block`, for Krea 2. `vec` becomes [B, S, D], a modulation for each token.

    The block's own code also takes such a `vec` in place of [B, 1, D] for all tokens.
    """

    class ByToken(kind):  # type: ignore[valid-type, misc]
        def __call__(self, x, vec, freqs, mask=None, timestep_zero_index=None, **named):
            at_zero_S = rows_at_zero(timestep_zero_index, named["transformer_options"], x.device)
            return super().__call__(x, vec, freqs, mask, timestep_zero_index=at_zero_S, **named)

        def forward(self, x, vec, freqs, mask=None, timestep_zero_index=None, **named):
            vec = vec if timestep_zero_index is None else by_token(vec, timestep_zero_index)
            return super().forward(x, vec, freqs, mask, **named)

    return ByToken


def rows_at_zero(first: int | None, options: Mapping[str, Any], device: torch.device) -> torch.Tensor | None:
    """[S] bool of all tokens: whether one is the `first` reference's or behind it."""
    if first is None:
        return None
    return torch.arange(first + sum(options["reference_image_num_tokens"]), device=device) >= first


def by_token(both: torch.Tensor, at_zero_S: torch.Tensor) -> torch.Tensor:
    """[2 B, 1, D], of the sampler's time and of time 0 -> [B, S, D]."""
    usual, zero = both.chunk(2)
    return torch.where(at_zero_S[:, None], zero, usual)


@functools.cache
def cosmos_predict2_block(kind: type[nn.Module]) -> type[nn.Module]:
    """Times of frames [B, T, D] become Indexed. A part of the tokens, on axes of one frame and one row, runs as frames of a
    token each."""

    class ByIndex(kind):  # type: ignore[valid-type, misc]
        def __call__(self, x, emb, *others, adaln_lora_B_T_3D=None, **named):
            if (frames := emb.shape[1]) > 1:
                tokens = named["rope_emb_L_1_1_D"].shape[1]  # of the whole, in all blocks
                emb = Indexed(emb, torch.arange(tokens, device=x.device) // (tokens // frames), tokens)
            return super().__call__(x, emb, *others, adaln_lora_B_T_3D=adaln_lora_B_T_3D, **named)

        def forward(self, x, emb, *others, adaln_lora_B_T_3D=None, **named):
            if not isinstance(emb, Indexed):
                return super().forward(x, emb, *others, adaln_lora_B_T_3D=adaln_lora_B_T_3D, **named)
            if x.shape[1] == emb.data_BFD.shape[1]:  # the frames themselves
                return super().forward(x, emb.data_BFD, *others, adaln_lora_B_T_3D=adaln_lora_B_T_3D, **named)
            lora = None if adaln_lora_B_T_3D is None else adaln_lora_B_T_3D[:, emb.index_S]
            of_tokens = x.flatten(1, 3)[:, :, None, None]
            out = super().forward(of_tokens, emb.data_BFD[:, emb.index_S], *others, adaln_lora_B_T_3D=lora, **named)
            return out.view(x.shape)

    return ByIndex


@functools.cache
def pixart_attention(kind: type[nn.Module]) -> type[nn.Module]:
    """Heads are as wide as the layers make them, and not as the input says: a tensor rank has fewer of them."""

    class ByHeads(kind):  # type: ignore[valid-type, misc]
        def forward(self, x, mask=None, HW=None, block_id=None):
            if mask is not None or self.sr_ratio > 1:
                return super().forward(x, mask, HW, block_id)
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.proj(attention_of(kind, "optimized_attention")(self.q_norm(q), self.k_norm(k), v, self.num_heads))

    return ByHeads


@functools.cache
def pixart_cross_attention(kind: type[nn.Module]) -> type[nn.Module]:
    """As `pixart_attention`. Text of all entries is in a row."""

    class ByHeads(kind):  # type: ignore[valid-type, misc]
        def forward(self, x, cond, mask=None):
            if mask is not None:
                return super().forward(x, cond, mask)
            k, v = (each.reshape(len(x), -1, each.shape[-1]) for each in self.kv_linear(cond).chunk(2, dim=-1))
            return self.proj(attention_of(kind, "optimized_attention")(self.q_linear(x), k, v, self.num_heads))

    return ByHeads


UNCHANGED = Adapter("", {})
GUIDES = {"guide_attention_entries": without_weights}
WAN = Adapter("blocks", {}, model=wan_model, options=(FREQUENCY,))
PIXART = Adapter("blocks", {"attn": pixart_attention, "cross_attn": pixart_cross_attention})
ADAPTERS: Mapping[str, Adapter] = {
    "MiniMaxH3": Adapter(
        "blocks",
        {"": minimax_h3_block},
        {"minimax_payload": frozenset({"layout"})},
        model=minimax_h3_model,
        carries=True,
        segments=minimax_h3_segments,
        gate=GATE,
        one_entry=True,
        here=("condition_proj", "token_refiner"),
    ),
    "LTXV": Adapter("transformer_blocks", {}, idle=GUIDES),
    "LTXAV": Adapter(
        "transformer_blocks",
        LTX2_FORMS,
        model=ltx_model,
        arguments=ltx_arguments,
        stated=("rope_type", "causal_temporal_positioning", "use_middle_indices_grid"),
        here=("video_embeddings_connector", "audio_embeddings_connector"),
    ),
    **dict.fromkeys(("WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN21_FlowRVS"), WAN),
    **dict.fromkeys(("WAN21_Vace", "WAN21_Camera", "WAN22_Camera"), WAN),
    "WAN22_T2V": replace(WAN, forms={"": wan_block}),
    "WAN22_Animate": Adapter(
        "blocks",
        {"": wan_animate_block},
        model=wan_animate_model,
        here=("motion_encoder", "face_encoder"),
        computed={"face_pixel_values": "face_motion"},
        moves=put_faces_into_blocks,
        unskipped="between its blocks the class runs modules that are not skipped with them",
        own_name=name_of_face,
        options=(FREQUENCY,),
    ),
    "WAN_Animate2": Adapter(
        "blocks",
        {"": animate2_block},
        model=animate2_model,
        arguments=animate2_arguments,
        unskipped="the pose runs through a block that is skipped for the video",
    ),
    "SeedVR2": Adapter(
        "blocks",
        {"": seedvr2_block, "attn": seedvr2_attention},
        model=seedvr2_model,
        check=check_condition,
    ),
    "QwenImage": Adapter("transformer_blocks", {"": qwen_image_block}),
    "QwenImage21": Adapter("transformer_blocks", {"": qwen_image21_block}, model=qwen_image21_model, steady=True),
    "Krea2": Adapter("blocks", {"": krea2_block}),
    **dict.fromkeys(("CosmosT2IPredict2", "CosmosI2VPredict2"), Adapter("blocks", {"": cosmos_predict2_block})),
    **dict.fromkeys(("PixArtAlpha", "PixArtSigma"), PIXART),
}
"""Class of ComfyUI's supported_models -> its adapter."""
