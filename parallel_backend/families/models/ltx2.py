"""The transformer of LTX-2: diffusers' class with ComfyUI's arithmetic, and without a copy of the times for every token.

Where ComfyUI (comfy/ldm/lightricks/av_model.py) and diffusers differ, this class follows ComfyUI. Sound attends to the video
that has already attended to sound. Norms of queries and keys have an epsilon of 1e-5. Between the streams, gates follow the
other stream's latest time; scales and shifts follow each token's time. Guides have attention weights. Modulation is computed
once for each distinct time.

Shape letters: b batch entries, n video tokens, a sound tokens, t text tokens, u distinct times of a stream, d its width.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_ltx2 as original

from ..parts.ltx2_inputs import UNSEEN, Times
from . import fused

QUERY_KEY_EPS = 1e-5


Biases = tuple[torch.Tensor, torch.Tensor]
"""Factors [b, q, r] of queries and [b, k, r] of keys, whose products are added to the attention scores."""


class Modulation(NamedTuple):
    """Embedded times, by which a stream's blocks are modulated."""

    within: torch.Tensor
    """[u, k d], for each distinct time of its tokens: for self-attention, text and feed-forward."""
    cross: torch.Tensor
    """[u, 4 d]: as `within`, for attention between the streams."""
    gate: torch.Tensor
    """[1, d]: for the latest time of the other stream."""
    prompt: torch.Tensor | None
    """[b, 2 d]: for the latest time of the stream. None: the prompt is not modulated by time."""
    rows: torch.Tensor | None
    """See Times.rows."""


def modulation(table: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor | None, which: slice) -> list[torch.Tensor]:
    """Vectors `which` of table [k, d] + embedded [u, k d], for each token: [b, n, d] each; [u, 1, d] without `rows`."""
    values = (table + embedded.unflatten(-1, (len(table), -1)))[:, which].unbind(1)
    return [value[:, None] if rows is None else value[rows] for value in values]


class Attention(original.LTX2PerturbedAttnProcessor):
    """diffusers' processor, with a rotation for each head, and with Biases.

    Biases become r further channels of queries and keys, so that every cut of the sequence and every kernel has them.
    """

    def __call__(
        self,
        attn: original.LTX2Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: fused.Rotation | None = None,
        key_rotary_emb: fused.Rotation | None = None,
        all_perturbed: bool = False,
        bias: Biases | None = None,
    ) -> torch.Tensor:
        looked_at = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        value = attn.to_v(looked_at).unflatten(2, (attn.heads, -1))
        out = value
        if not all_perturbed:
            query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(looked_at))
            query, key = (x.unflatten(2, (attn.heads, -1)) for x in (query, key))
            halves = attn.rope_type == "split"
            if query_rotary_emb is not None and key_rotary_emb is None:
                query, key = fused.both_rotated(query, key, query_rotary_emb, halves)
            elif query_rotary_emb is not None:
                rotated = fused.halves_rotated if halves else fused.rotated
                query, key = rotated(query, query_rotary_emb), rotated(key, key_rotary_emb)
            out = self._attend(query, key, value, bias)
        if attn.to_gate_logits is not None:
            out = out * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states)))[..., None]
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Biases | None) -> torch.Tensor:
        size = query.shape[-1]
        if bias is not None:
            factors = bias[0].shape[-1]
            query, key = (
                torch.cat((x, factor.to(x.dtype)[:, :, None].expand(-1, -1, x.shape[2], -1)), dim=-1)
                for x, factor in ((query, bias[0] * size**0.5), (key, bias[1]))  # scores are scaled by size**-0.5
            )
            wide = -(-(size + factors) // 8) * 8  # kernels want head sizes of whole eights
            query, key, value = (F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
        backend, parallel = self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, scale=size**-0.5, backend=backend, parallel_config=parallel)
        return out[..., :size]


def _biases(
    x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None, seen: torch.Tensor | None
) -> tuple[Biases | None, Biases | None]:
    """Biases of the video's self-attention, and of the sound's attention to the video.

    `weights` [b, n, 2]: logarithm of a guide's weight, and 1 for its tokens. It weighs attention between guides and the rest
    of the video in both directions, not among guides. `seen` [b, n, 1] bool: False for tokens that nothing attends to.
    """
    if weights is None and seen is None:
        return None, None
    ones = x.new_ones(*x.shape[:2], 1)
    hidden = torch.zeros_like(ones) if seen is None else ones.masked_fill(~seen, UNSEEN).masked_fill(seen, 0.0)
    queries, keys = [ones], [hidden]
    if weights is not None:
        weight, others = weights[..., :1].to(x.dtype), 1 - weights[..., 1:].to(x.dtype)
        queries, keys = [*queries, others, weight], [*keys, weight, others]
    of_sound = None if seen is None else (y.new_ones(*y.shape[:2], 1), hidden)
    return (torch.cat(queries, dim=-1), torch.cat(keys, dim=-1)), of_sound


class RotaryTables(original.LTX2AudioVideoRotaryPosEmbed):
    """diffusers' tables, as rotations."""

    def forward(self, coords: torch.Tensor) -> fused.Rotation:
        """Positions [b, axes, n] -> [b, n, heads, r, 2, 2]."""
        if not coords.shape[-1]:
            return coords.new_zeros(len(coords), 0, self.num_attention_heads, 1, 2, 2)
        cos, sin = super().forward(coords)
        if self.rope_type == "split":
            return fused.rotation(cos.transpose(1, 2), sin.transpose(1, 2))
        return fused.rotation(*(table[..., 0::2].unflatten(-1, (self.num_attention_heads, -1)) for table in (cos, sin)))


class Block(original.LTX2VideoTransformerBlock):
    """A block in ComfyUI's order, with the weights of diffusers' block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        audio_hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        audio_encoder_hidden_states: torch.Tensor,
        times: Modulation,
        audio_times: Modulation,
        rope: fused.Rotation,
        audio_rope: fused.Rotation,
        cross_rope: fused.Rotation,
        audio_cross_rope: fused.Rotation,
        guide_bias: Biases | None = None,
        audio_guide_bias: Biases | None = None,
        audio_to_video: bool = True,
        video_to_audio: bool = True,
        perturbed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video [b, n, d] and sound [b, a, d'], with their texts [b, t, d] and [b, t, d'] -> the same shapes.

        `guide_bias`, `audio_guide_bias`: see `_biases`. `perturbed`: self-attention is left out (spatio-temporal guidance).
        """
        x, y = hidden_states, audio_hidden_states
        x = self._look_at_itself(x, "", times, rope, perturbed, guide_bias)
        x = self._look_at_text(x, "", times, encoder_hidden_states)
        y = self._look_at_itself(y, "audio_", audio_times, audio_rope, perturbed, None)
        y = self._look_at_text(y, "audio_", audio_times, audio_encoder_hidden_states)
        table, audio_table = self.video_a2v_cross_attn_scale_shift_table, self.audio_a2v_cross_attn_scale_shift_table
        if audio_to_video:
            scale, shift = modulation(table[:4], times.cross, times.rows, slice(0, 2))
            audio_scale, audio_shift = modulation(audio_table[:4], audio_times.cross, audio_times.rows, slice(0, 2))
            out = self.audio_to_video_attn(
                fused.modulated(self.audio_to_video_norm, x, scale, shift),
                encoder_hidden_states=fused.modulated(self.video_to_audio_norm, y, audio_scale, audio_shift),
                query_rotary_emb=cross_rope,
                key_rotary_emb=audio_cross_rope,
            )
            x = fused.gated(x, table[4:] + times.gate, out)
        if video_to_audio:
            scale, shift = modulation(table[:4], times.cross, times.rows, slice(2, 4))
            audio_scale, audio_shift = modulation(audio_table[:4], audio_times.cross, audio_times.rows, slice(2, 4))
            out = self.video_to_audio_attn(
                fused.modulated(self.video_to_audio_norm, y, audio_scale, audio_shift),
                encoder_hidden_states=fused.modulated(self.audio_to_video_norm, x, scale, shift),
                query_rotary_emb=audio_cross_rope,
                key_rotary_emb=cross_rope,
                bias=audio_guide_bias,
            )
            y = fused.gated(y, audio_table[4:] + audio_times.gate, out)
        return self._feed_forward(x, "", times), self._feed_forward(y, "audio_", audio_times)

    def _look_at_itself(
        self, x: torch.Tensor, stream: str, times: Modulation, rope: fused.Rotation, perturbed: bool, bias: Biases | None
    ) -> torch.Tensor:
        table = getattr(self, f"{stream}scale_shift_table")
        shift, scale, gate = modulation(table, times.within, times.rows, slice(0, 3))
        normed = fused.modulated(getattr(self, f"{stream}norm1"), x, scale, shift)
        attention = getattr(self, f"{stream}attn1")
        return fused.gated(x, gate, attention(normed, query_rotary_emb=rope, all_perturbed=perturbed, bias=bias))

    def _look_at_text(self, x: torch.Tensor, stream: str, times: Modulation, text: torch.Tensor) -> torch.Tensor:
        if not x.shape[1]:
            return x
        attention, norm = getattr(self, f"{stream}attn2"), getattr(self, f"{stream}norm2")
        if not self.cross_attn_adaln:
            return x + attention(norm(x), encoder_hidden_states=text)
        table = getattr(self, f"{stream}scale_shift_table")
        shift, scale, gate = modulation(table, times.within, times.rows, slice(6, 9))
        table = getattr(self, f"{stream}prompt_scale_shift_table")
        text_shift, text_scale = (
            table[None] if times.prompt is None else table + times.prompt.unflatten(-1, (2, -1))
        ).split(1, 1)
        text = torch.addcmul(text_shift, text, 1 + text_scale)
        return fused.gated(x, gate, attention(fused.modulated(norm, x, scale, shift), encoder_hidden_states=text))

    def _feed_forward(self, x: torch.Tensor, stream: str, times: Modulation) -> torch.Tensor:
        table = getattr(self, f"{stream}scale_shift_table")
        shift, scale, gate = modulation(table, times.within, times.rows, slice(3, 6))
        normed = fused.modulated(getattr(self, f"{stream}norm3"), x, scale, shift)
        return fused.gated(x, gate, getattr(self, f"{stream}ff")(normed))


class LTX2VideoTransformer3DModel(original.LTX2VideoTransformer3DModel):
    """diffusers' class of that name, with its constructor and its weights, and a forward that takes times and positions."""

    @functools.wraps(original.LTX2VideoTransformer3DModel.__init__)
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        for module in self.modules():
            if isinstance(module, original.LTX2Attention):
                module.norm_q.eps = module.norm_k.eps = QUERY_KEY_EPS
                module.set_processor(Attention())
            elif isinstance(module, original.LTX2AudioVideoRotaryPosEmbed):
                module.__class__ = RotaryTables
            elif isinstance(module, original.LTX2VideoTransformerBlock):
                module.__class__ = Block

    def forward(
        self,
        hidden_states: torch.Tensor,
        audio_hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        audio_encoder_hidden_states: torch.Tensor,
        times: Times,
        audio_times: Times,
        video_coords: torch.Tensor,
        audio_coords: torch.Tensor,
        marked: torch.Tensor | None = None,
        guide_weights: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
        voice_tokens: int = 0,
        audio_to_video: bool = True,
        video_to_audio: bool = True,
        perturbed: frozenset[int] = frozenset(),
        return_dict: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video tokens [b, n, c] and sound tokens [b, a, c'] -> the model's output for both, the same shapes.

        `video_coords` [b, 3, n]: seconds, row and column in pixels of the tokens' middles. `audio_coords` [b, 1, a]:
        seconds. `marked` [n, 1] bool: tokens of the first frame. `guide_weights` [b, n, 2], `seen` [b, n, 1] bool: see
        `_biases`; tokens that are not seen give zero. `voice_tokens`: number of tokens at the sound's end that give no
        output. `perturbed`: numbers of blocks. The others: see Block.
        """
        assert not return_dict
        cross, audio_cross = self.cross_attn_rope(video_coords[:, :1]), self.cross_attn_audio_rope(audio_coords)
        rope, audio_rope = self.rope(video_coords), self.audio_rope(audio_coords)
        x, y = self.proj_in(hidden_states), self.audio_proj_in(audio_hidden_states)
        if marked is not None:
            x = x + marked.to(x.dtype) * self.keyframes_abs_pos_embedding.to(x.dtype)
        embedded, modulated = self._embedded("", times, audio_times.latest, x.dtype)
        audio_embedded, audio_modulated = self._embedded("audio_", audio_times, times.latest, x.dtype)
        bias, audio_bias = _biases(x, y, guide_weights, seen)
        text, audio_text = encoder_hidden_states, audio_encoder_hidden_states
        if self.config["use_prompt_embeddings"]:
            text, audio_text = self.caption_projection(text), self.audio_caption_projection(audio_text)
        for index, block in enumerate(self.transformer_blocks):
            x, y = block(
                hidden_states=x,
                audio_hidden_states=y,
                encoder_hidden_states=text,
                audio_encoder_hidden_states=audio_text,
                times=modulated,
                audio_times=audio_modulated,
                rope=rope,
                audio_rope=audio_rope,
                cross_rope=cross,
                audio_cross_rope=audio_cross,
                guide_bias=bias,
                audio_guide_bias=audio_bias,
                audio_to_video=audio_to_video,
                video_to_audio=video_to_audio,
                perturbed=index in perturbed,
            )
        shift, scale = modulation(self.scale_shift_table, embedded.repeat(1, 2), times.rows, slice(0, 2))
        x = self.proj_out(fused.modulated(self.norm_out, x, scale, shift))
        x = x if seen is None else x * seen
        shift, scale = modulation(self.audio_scale_shift_table, audio_embedded.repeat(1, 2), audio_times.rows, slice(0, 2))
        y = self.audio_proj_out(fused.modulated(self.audio_norm_out, y, scale, shift))
        return x, y[:, : y.shape[1] - voice_tokens]

    def _embedded(
        self, stream: str, times: Times, others: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Modulation]:
        """Embedded times [u, d] of a stream, for its last norm, and the modulation of its blocks.

        `stream`: "" (video) or "audio_". `others` [b]: the latest time of the other stream.
        """
        named = "audio" if stream else "video"
        gates = self.av_cross_attn_audio_v2a_gate if stream else self.av_cross_attn_video_a2v_gate
        within, embedded = getattr(self, f"{stream}time_embed")(times.distinct, hidden_dtype=dtype)
        cross, _ = getattr(self, f"av_cross_attn_{named}_scale_shift")(times.distinct, hidden_dtype=dtype)
        factor = self.config["cross_attn_timestep_scale_multiplier"] / self.config["timestep_scale_multiplier"]
        gate, _ = gates(others.max()[None] * factor, hidden_dtype=dtype)
        prompt = None
        if self.prompt_modulation and self.config["use_prompt_adaln_single"]:
            prompt, _ = getattr(self, f"{stream}prompt_adaln")(times.latest, hidden_dtype=dtype)
        return embedded, Modulation(within, cross, gate, prompt, times.rows)
