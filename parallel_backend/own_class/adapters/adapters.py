"""Changes of single classes: arguments that are not sent, and blocks that take tokens in another form.

Such a block gets another `__call__` that converts its arguments to what ranks can cut: tensors with an axis of tokens. The
trials prove these classes as they prove all others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallel_backend.core.sparse_attention import Runs
from parallel_backend.own_class.adapters.animate2_forms import Animate2Block, Animate2Model, animate2_arguments
from parallel_backend.own_class.adapters.ltx_forms import LTX2_FORMS, Indexed, LtxModel, ltx2_arguments, ltx_arguments
from parallel_backend.own_class.adapters.minimax_forms import (
    GATE,
    MinimaxH3Block,
    MinimaxH3Model,
    minimax_h3_arguments,
    minimax_h3_segments,
)
from parallel_backend.own_class.adapters.qwen_forms import QwenImage21Block, QwenImage21Model
from parallel_backend.own_class.adapters.seedvr_forms import (
    Seedvr2Attention,
    Seedvr2Block,
    Seedvr2Model,
    seedvr2_arguments,
)
from parallel_backend.own_class.adapters.wan_forms import (
    FREQUENCY,
    WanAnimateBlock,
    WanAnimateModel,
    WanBlock,
    WanModel,
    name_of_face,
    put_faces_into_blocks,
)
from parallel_backend.own_class.cuts.attention_calls import module_global
from parallel_backend.own_class.cuts.forms import Form, put_form

Arguments = Callable[[Mapping[str, Any], Any, tuple[int, ...]], dict[str, Any]]
"""(a call's arguments, the class, the whole latent's sizes) -> the arguments to send. Raises ValueError for arguments that
the class does not take."""


@dataclass(frozen=True)
class Adapter:
    """Changes to one of ComfyUI's classes that let ranks run it."""

    blocks: str
    """Name of the class's list of blocks."""
    forms: Mapping[str, type[Form]]
    """Module in a block -> its form. The empty name is the block itself, whose form has another `__call__`."""
    model: type[Form] | None = None
    """The form of the model itself. None: the model is not changed."""
    arguments: Arguments = lambda arguments, _native, _sizes: dict(arguments)
    """Converts a call's arguments to those that ranks get and that `model` takes."""
    stated: tuple[str, ...] = ()
    """Entries that the file's header must have, because ComfyUI's defaults for them fit no model of the class."""
    carries: bool = False
    """Whether its `forward` changes latents before and after `_forward`. Calls of `_forward` alone have
    minimax_forms.INSIDE."""
    segments: Callable[..., tuple[Runs, tuple[int, ...]]] = lambda _latents, _arguments, _native: ((), ())
    """(latents, arguments, the class) -> `segments` and `grid` of SparseAttention for a call. Empty: unknown."""
    gate: str = ""
    """A layer that blocks may have and that the class never runs. Video sparse attention (VSA) reads it. Tensor ranks split
    it by heads."""
    one_entry: bool = False
    """Whether the class takes one batch entry at a time. The client then makes one call for each entry."""
    here: tuple[str, ...] = ()
    """Modules that only ComfyUI's process runs, on a prompt's text or for `computed`. Ranks do not have their weights."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """Argument of a call -> method of `model` whose result is sent instead of it. The method runs in ComfyUI's process."""
    moves: Callable[[nn.Module], None] | None = None
    """Moves modules that the class runs between its blocks into the blocks."""
    unskipped: str = ""
    """Why other nodes cannot skip its blocks. Empty: a trial decides."""
    own_name: Callable[[str], str] = lambda name: name
    """The class's own name for a parameter that `moves` may have moved."""
    options: tuple[str, ...] = ()
    """Entries of transformer_options that this pack adds and `model` reads."""
    steady: bool = False
    """See OwnLatent.steady. A trial proves it."""
    of_prompt: tuple[str, ...] = ()
    """Modules that only get the prompt, according to the class's code. If a rank finds their outputs equal at two timesteps
    (rank/stage/module_cache.py), it computes them once for each prompt."""


def adapter_of(kind: str) -> Adapter:
    """Return the adapter of a class of ComfyUI's supported_models. Other classes get one that changes nothing."""
    return ADAPTERS.get(kind, UNCHANGED)


def adapt(kind: str, model: nn.Module) -> None:
    """Apply the adapter of a class of ComfyUI's supported_models to a model of that class."""
    adapter = adapter_of(kind)
    if adapter.model is not None:
        put_form(adapter.model, model)
    if adapter.moves is not None:
        adapter.moves(model)
    for block in model.get_submodule(adapter.blocks).children():
        for name, form in adapter.forms.items():
            put_form(form, block.get_submodule(name))


class QwenImageBlock(Form):
    """Qwen-Image's block with a mask of tokens [S] instead of `timestep_zero_index`, so that ranks can cut it by tokens.

    The index is the number of the first reference token. That token and all after it have timestep 0. transformer_options
    has the token counts of all references.
    """

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


class Krea2Block(Form):
    """Krea 2's block, changed as `QwenImageBlock`. `vec` becomes [B, S, D], a modulation for each token. The block's own
    code takes such a `vec` too, instead of [B, 1, D] for all tokens."""

    def __call__(self, x, vec, freqs, mask=None, timestep_zero_index=None, **named):
        at_zero_S = rows_at_zero(timestep_zero_index, named["transformer_options"], x.device)
        return super().__call__(x, vec, freqs, mask, timestep_zero_index=at_zero_S, **named)

    def forward(self, x, vec, freqs, mask=None, timestep_zero_index=None, **named):
        vec = vec if timestep_zero_index is None else by_token(vec, timestep_zero_index)
        return super().forward(x, vec, freqs, mask, **named)


def rows_at_zero(first: int | None, options: Mapping[str, Any], device: torch.device) -> torch.Tensor | None:
    """[S] bool: whether a token's number is at least `first`. None: there are no references."""
    if first is None:
        return None
    return torch.arange(first + sum(options["reference_image_num_tokens"]), device=device) >= first


def by_token(both: torch.Tensor, at_zero_S: torch.Tensor) -> torch.Tensor:
    """Modulation [B, S, D] for each token, from [2 B, 1, D]: first that of the sampler's timestep, then that of timestep
    0."""
    usual, zero = both.chunk(2)
    return torch.where(at_zero_S[:, None], zero, usual)


class CosmosPredict2Block(Form):
    """Cosmos Predict 2's block. Timesteps of frames [B, T, D] are passed as an `Indexed`, which ranks cut by tokens. A
    rank's tokens, all in one row of one frame, run as frames with one token each."""

    def __call__(self, x, emb, *others, adaln_lora_B_T_3D=None, **named):
        if emb.shape[1] > 1:
            emb = Indexed.of(emb, named["rope_emb_L_1_1_D"].shape[1])  # a row for each token of the whole, in all blocks
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


class PixartAttention(Form):
    """PixArt's attention with the number of heads taken from the layers, whose features tensor ranks split."""

    def forward(self, x, mask=None, HW=None, block_id=None):
        if mask is not None or self.sr_ratio > 1:
            return super().forward(x, mask, HW, block_id)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(
            module_global(self.native, "optimized_attention")(self.q_norm(q), self.k_norm(k), v, self.num_heads)
        )


class PixartCrossAttention(Form):
    """Like `PixartAttention`, for attention to the text. The class has the text of all batch entries in one row."""

    def forward(self, x, cond, mask=None):
        if mask is not None:
            return super().forward(x, cond, mask)
        k, v = (each.reshape(len(x), -1, each.shape[-1]) for each in self.kv_linear(cond).chunk(2, dim=-1))
        return self.proj(module_global(self.native, "optimized_attention")(self.q_linear(x), k, v, self.num_heads))


UNCHANGED = Adapter("", {})
WAN = Adapter("blocks", {}, model=WanModel, options=(FREQUENCY,))
PIXART = Adapter("blocks", {"attn": PixartAttention, "cross_attn": PixartCrossAttention})
ADAPTERS: Mapping[str, Adapter] = {
    "MiniMaxH3": Adapter(
        "blocks",
        {"": MinimaxH3Block},
        model=MinimaxH3Model,
        arguments=minimax_h3_arguments,
        carries=True,
        segments=minimax_h3_segments,
        gate=GATE,
        one_entry=True,
        here=("condition_proj", "token_refiner"),
    ),
    "LTXV": Adapter("transformer_blocks", {}, arguments=ltx_arguments),
    "LTXAV": Adapter(
        "transformer_blocks",
        LTX2_FORMS,
        model=LtxModel,
        arguments=ltx2_arguments,
        stated=("rope_type", "causal_temporal_positioning", "use_middle_indices_grid"),
        here=("video_embeddings_connector", "audio_embeddings_connector"),
    ),
    **dict.fromkeys(("WAN21_T2V", "WAN21_I2V", "WAN21_FunControl2V", "WAN21_FlowRVS"), WAN),
    **dict.fromkeys(("WAN21_Vace", "WAN21_Camera", "WAN22_Camera"), WAN),
    "WAN22_T2V": replace(WAN, forms={"": WanBlock}),
    "WAN22_Animate": Adapter(
        "blocks",
        {"": WanAnimateBlock},
        model=WanAnimateModel,
        here=("motion_encoder", "face_encoder"),
        computed={"face_pixel_values": "face_motion"},
        moves=put_faces_into_blocks,
        unskipped="the class has modules between its blocks, which skipping its blocks does not skip",
        own_name=name_of_face,
        options=(FREQUENCY,),
    ),
    "WAN_Animate2": Adapter(
        "blocks",
        {"": Animate2Block},
        model=Animate2Model,
        arguments=animate2_arguments,
        unskipped="the pose runs through a block that is skipped for the video",
    ),
    "SeedVR2": Adapter(
        "blocks",
        {"": Seedvr2Block, "attn": Seedvr2Attention},
        model=Seedvr2Model,
        arguments=seedvr2_arguments,
    ),
    "QwenImage": Adapter("transformer_blocks", {"": QwenImageBlock}),
    "QwenImage21": Adapter("transformer_blocks", {"": QwenImage21Block}, model=QwenImage21Model, steady=True),
    "Krea2": Adapter("blocks", {"": Krea2Block}, of_prompt=("txtfusion", "txtmlp")),
    **dict.fromkeys(("CosmosT2IPredict2", "CosmosI2VPredict2"), Adapter("blocks", {"": CosmosPredict2Block})),
    **dict.fromkeys(("PixArtAlpha", "PixArtSigma"), PIXART),
}
"""Name of a class in ComfyUI's supported_models -> its adapter."""
