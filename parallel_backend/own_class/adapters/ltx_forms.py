"""LTX-2's model, blocks and attention in a form that ranks can cut.

Tokens that a guide leaves out stay, but nothing attends to them. Guides' weights become factors of each token. If guidance
skips an attention call, the call still runs and its result is dropped: every step then has the same calls in the same order.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.own_class import PACKAGES
from parallel_backend.own_class.cuts.attention_calls import module_global
from parallel_backend.own_class.cuts.forms import Form

PASSES = "stg_skip_self_attn"
"""Option of a block: its self-attention returns its values, as if each token attended only to itself."""
TO_VIDEO, TO_AUDIO = SEVERED = "a2v_cross_attn", "v2a_cross_attn"
"""Options of a call. False: the video does not attend to the audio, or the audio not to the video."""
PROMPT_TABLES = {"v_prompt_timestep": "prompt_scale_shift_table", "a_prompt_timestep": "audio_prompt_scale_shift_table"}
"""Argument of a block -> the block's table that modulates the prompt. In LTX 2.5 the argument is None, and only the table is
used; the class in ComfyUI 0.33 cannot run that."""
FACTORS, OF_AUDIO, LEFT_OUT = "parallel_dit_factors", "parallel_dit_factors_of_audio", "parallel_dit_left_out"
UNSEEN = -30000.0
"""Added to the scores of a key that is left out. It is finite in fp16, so that a row without other keys has numbers."""
EIGHTS = 8
"""Attention kernels need head sizes that are multiples of this."""


class Indexed(NamedTuple):
    """Values of frames [B, F, ...], such as LTX-2's CompressedTimestep, and for each token the number of its frame. Ranks
    cut the numbers by tokens."""

    data_BFD: torch.Tensor
    index_S: torch.Tensor
    tokens: int
    """Number of all tokens. On a rank, `index_S` has only its own."""

    @classmethod
    def of(cls, data_BFD: torch.Tensor, tokens: int) -> "Indexed":
        """`data_BFD` with an index for all `tokens`, which are ordered by frame."""
        frames = data_BFD.shape[1]
        return cls(data_BFD, torch.arange(tokens, device=data_BFD.device) // -(-tokens // frames), tokens)


class Factors(NamedTuple):
    """Additions to the scores of attention to the video, as factors of queries and keys with a row for each token."""

    weights_1N2: torch.Tensor | None
    """[1, N, 2]: (logarithm of the guide's weight, 0) for a guide's token, (0, 1) for others. Attention between guides and
    the rest of the video is weighted in both directions; attention among guides is not."""
    unseen_1N1: torch.Tensor | None
    """[1, N, 1]: UNSEEN for tokens that are left out, otherwise 0."""

    def of(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([1, Q, n], [1, K, n]): factors whose product is added to the scores."""
        pairs = []
        if self.unseen_1N1 is not None:
            pairs.append((self.unseen_1N1.new_ones(1, q.shape[1], 1), self.unseen_1N1))
        if self.weights_1N2 is not None:
            pairs.append((self.weights_1N2.flip(-1), self.weights_1N2))
        of_queries, of_keys = (torch.cat(each, dim=-1) for each in zip(*pairs, strict=True))
        return of_queries.to(q.dtype), of_keys.to(k.dtype)


def ltx_arguments(arguments: Mapping[str, Any], _native: Any, _sizes: tuple[int, ...]) -> dict[str, Any]:
    """An LTX call's arguments, without guides that change no attention: those only say how many tokens each guide has."""
    entries = arguments.get("guide_attention_entries") or ()
    if any(each["strength"] != 1.0 or each.get("pixel_mask") is not None for each in entries):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name != "guide_attention_entries"}


def ltx2_arguments(arguments: Mapping[str, Any], native: Any, _sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return an LTX-2 call's arguments. Mask and guides are replaced by arguments that its blocks take.

    `spatial`: whether timesteps differ within a frame. `guide_weights`: [1, K], of the last K tokens. `unseen`: [1, N], see
    Factors. Raises ValueError for guides that do not fit the latent.
    """
    named = {name: each for name, each in arguments.items() if name not in ("audio_denoise_mask", "guide_attention_entries")}
    mask, keyframes = named.pop("denoise_mask", None), named.get("keyframe_idxs")
    guides = 0 if keyframes is None else keyframes.shape[2]
    if mask is None:
        if guides:
            raise ValueError(
                "latent_image: the conditioning has guides, but this latent lacks their mask. Use the latent output of "
                "LTXVAddGuide."
            )
        return named
    mask = mask[:1].float().cpu()
    cells, tokens = mask[0, 0, 0].numel(), mask[0, 0].numel()
    frames = mask[0, 0].flatten(1)
    if not torch.equal(frames.amin(1), frames.amax(1)):
        named["spatial"] = True
    if not guides:
        return named
    if guides % cells or guides > tokens:
        raise ValueError(
            f"positive, negative: the guides have {guides} tokens, which is not a whole number of frames of this "
            "latent_image. Their size differs. Crop them with LTXVCropGuides before the latent is enlarged, and add "
            "them again."
        )
    left_out_1N = (mask < 0).any(1).flatten(1)
    if left_out_1N.any():
        named["unseen"] = torch.where(left_out_1N, UNSEEN, 0.0)
    entries = arguments.get("guide_attention_entries") or ()
    weights = guide_weights(entries, ~left_out_1N[0, -guides:], native._downsample_mask_to_latent)
    return named if (weights == 1).all() else named | {"guide_weights": weights[None]}


def guide_weights(
    entries: Sequence[Mapping[str, Any]], seen_K: torch.Tensor, downsampled: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return weights [K] of the guides' tokens. A guide's mask has the weights of only those tokens that are not left out.
    `downsampled`: the class's function that converts a guide's mask from pixels to tokens."""
    weights, start = torch.ones(len(seen_K)), 0
    for guide in entries:
        stop = start + guide["pre_filter_count"]
        kept = seen_K[start:stop].nonzero()[:, 0] + start
        of_kept = torch.ones(len(kept))
        if (mask := guide.get("pixel_mask")) is not None and guide.get("latent_shape") is not None:
            of_kept = downsampled(mask.float().cpu(), *guide["latent_shape"])[0, : len(kept)]
        weights[kept[: len(of_kept)]] = of_kept * guide["strength"]
        start = stop
    return weights


class LtxModel(Form):
    """LTX-2's model, which takes the arguments of `ltx2_arguments`."""

    def _process_input(self, x, keyframe_idxs, denoise_mask, spatial=False, **kwargs):
        no_mask = None if keyframe_idxs is None else torch.zeros_like(x[0][:1, :1])
        tokens, places, more = super()._process_input(x, keyframe_idxs, no_mask, **kwargs)
        return tokens, places, more | {"has_spatial_mask": spatial}

    def _prepare_timestep(self, timestep, *others, unseen=None, **kwargs):
        # Times of tokens that are left out are below zero.
        timestep = timestep if unseen is None else timestep.clamp(min=0)
        return super()._prepare_timestep(timestep, *others, **kwargs)

    def _build_guide_self_attention_mask(self, x, transformer_options, merged_args):
        weights, unseen = merged_args.get("guide_weights"), merged_args.get("unseen")
        if weights is None and unseen is None:
            return None
        if weights is not None:
            guides = torch.stack((weights.float().log().clamp(min=UNSEEN), torch.zeros_like(weights)), dim=-1)
            others = guides.new_tensor((0.0, 1.0)).expand(1, x[0].shape[1] - weights.shape[1], 2)
            weights = torch.cat((others, guides), dim=1)
        return Factors(weights, None if unseen is None else unseen[..., None])

    def _process_output(self, x, embedded_timestep, keyframe_idxs, unseen=None, **kwargs):
        out = super()._process_output(x, embedded_timestep, keyframe_idxs, **kwargs)
        if unseen is None:
            return out
        video, *audio = [out] if isinstance(out, torch.Tensor) else out
        video = video * unseen.exp().view(video.shape[2:]).to(video.dtype)
        return [video, *audio] if audio else video


class LtxBlock(Form):
    """LTX-2's block. Timesteps of frames are passed as an `Indexed`. Its options carry what its attention needs."""

    def __call__(self, x, **named):
        return super().__call__(x, **{name: indexed(value) for name, value in named.items()})

    def forward(self, x, self_attention_mask=None, transformer_options=None, **named):
        options = dict(transformer_options)
        if self_attention_mask is not None:
            options[FACTORS] = self_attention_mask
            if self_attention_mask.unseen_1N1 is not None:
                options[OF_AUDIO] = self_attention_mask._replace(weights_1N2=None)
        if left_out := {name for name in SEVERED if options.get(name, True) is False}:
            options |= {LEFT_OUT: left_out, **dict.fromkeys(SEVERED, True)}
        for name, table in PROMPT_TABLES.items():
            if named.get(name) is None and hasattr(self, table):
                named[name] = x[0].new_zeros(len(x[0]), 1, getattr(self, table).numel())
        return super().forward(x, transformer_options=options, **named)

    def get_ada_values(self, scale_shift_table, batch_size, timestep, indices=slice(None)):
        by_frame = isinstance(timestep, Indexed)
        data_BTD = timestep.data_BFD if by_frame else timestep
        rows = data_BTD.view(batch_size, data_BTD.shape[1], len(scale_shift_table), -1)[:, :, indices]
        values = (scale_shift_table[indices] + rows).unbind(2)  # the class's, in half as many operations
        return tuple(each[:, timestep.index_S] for each in values) if by_frame else values


def indexed(value: Any) -> Any:
    """Return an `Indexed` for a CompressedTimestep. Other values are returned as they are."""
    if type(value).__name__ != "CompressedTimestep":
        return value
    if value.patches_per_frame == 1 or value.num_frames == 1:
        return value.data
    return Indexed.of(value.data, value.num_frames * value.patches_per_frame)


class LtxAttention(Form):
    """LTX-2's attention. It runs in every call, even if guidance skips it, and then returns zeros."""

    factors = ""
    """Name of the option with its Factors. Empty: it has none."""
    severed = ""
    """Name of the option that skips it. Empty: none does."""

    def forward(self, x, context=None, mask=None, pe=None, k_pe=None, transformer_options=None):
        options = transformer_options or {}
        added, attends = options.get(self.factors), {**options, PASSES: False}
        if added is None:
            out = super().forward(x, context, mask, pe, k_pe, attends)
        else:
            out = self._with_factors(x, x if context is None else context, pe, pe if k_pe is None else k_pe, added, options)
        if context is None and options.get(PASSES):
            return super().forward(x, transformer_options=options)
        return torch.zeros_like(out) if self.severed in options.get(LEFT_OUT, ()) else out

    def _with_factors(self, x, seen, pe, k_pe, added, options):
        q, k, v = self.q_norm(self.to_q(x)), self.k_norm(self.to_k(seen)), self.to_v(seen)
        if pe is not None:
            rotated = module_global(self.native, "apply_rotary_emb")
            q, k = rotated(q, pe), rotated(k, k_pe)
        size, tensors = self.dim_head, []
        of_queries, of_keys = added.of(q, k)
        for each, more in ((q, of_queries * size**0.5), (k, of_keys), (v, v.new_zeros(1, v.shape[1], 0))):
            heads = each.unflatten(-1, (-1, size))
            heads = torch.cat((heads, more[:, :, None].expand(*heads.shape[:3], -1)), dim=-1)
            tensors.append(F.pad(heads, (0, -(-(size + of_keys.shape[-1]) // EIGHTS) * EIGHTS - heads.shape[-1])).flatten(2))
        exactly = {"scale": size**-0.5, "low_precision_attention": False, "transformer_options": options}
        out = attention_of_package(self.native)(*tensors, self.heads, attn_precision=self.attn_precision, **exactly)
        out = out.unflatten(-1, (self.heads, -1))[..., :size]
        if self.to_gate_logits is not None:
            out = out * (2.0 * torch.sigmoid(self.to_gate_logits(x))).unsqueeze(-1)
        return self.to_out(out.flatten(2))


def attention_of_package(kind: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """Return the attention function of the class's package at present. It may be a trial's or a rank's replacement."""
    package = next(each for each in PACKAGES if kind.__module__.startswith(each.root))
    function: Callable[..., torch.Tensor] = vars(sys.modules[package.attention])["optimized_attention"]
    return function


class VideoAttention(LtxAttention):
    """Attention of the video to itself."""

    factors = FACTORS


class ToVideoAttention(LtxAttention):
    """Attention of the video to the audio."""

    severed = TO_VIDEO


class ToAudioAttention(LtxAttention):
    """Attention of the audio to the video."""

    factors, severed = OF_AUDIO, TO_AUDIO


LTX2_FORMS: Mapping[str, type[Form]] = {
    "": LtxBlock,
    "attn1": VideoAttention,
    "audio_attn1": LtxAttention,
    "audio_to_video_attn": ToVideoAttention,
    "video_to_audio_attn": ToAudioAttention,
}
"""Name of a module in LTX-2's block -> its form, see adapters.Adapter.forms."""
