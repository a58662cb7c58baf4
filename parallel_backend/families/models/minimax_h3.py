"""MiniMax H3's transformer: diffusers' class on some of the tokens, also for pruned files.

Pruned files have a table over time in place of the time embedding's layers. Their adaLN layers take its rows, interpolated.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_minimax_h3 as original
from torch import nn

from ..parts.minimax_conditioning import KINDS
from . import fused
from .constructors import extends


class Block(original.MiniMaxH3TransformerBlock):
    """diffusers' block with a modulation for each time and kind of tokens, computed in the dtype of its layer."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        times: torch.Tensor,
        rows: torch.Tensor,
        rotary_emb: fused.Rotation,
        runs: fused.Runs | None,
    ) -> torch.Tensor:
        """[b, s, hidden] -> the same shape. `times` [t, time width]. `rows` [s]: time * KINDS + kind of each token. `runs`:
        the same, where it is the same for many tokens."""
        modulation = self.adaln_proj.linear(times).to(hidden_states.dtype)
        vectors = modulation.view(-1, 6 * hidden_states.shape[-1]).chunk(6, dim=-1)  # six of [t * KINDS, hidden]
        x = hidden_states
        parts = (self.norm1, lambda y: self.attn(y, rotary_emb), *vectors[:3]), (self.norm2, self.ff, *vectors[3:])
        for norm, part, shift, scale, gate in parts:
            if runs is None or torch.compiler.is_compiling():
                out = part(torch.addcmul(shift[rows], norm(x), (1 + scale)[rows]))
                x = torch.addcmul(x, gate[rows], out)
            else:
                x = fused.gated_in_runs(x, gate, part(fused.modulated_in_runs(norm, x, scale, shift, runs)), runs)
        return x


class Attention(original.MiniMaxH3AttnProcessor):
    """diffusers' processor, whose rotary table is a `fused.Rotation`."""

    def __call__(
        self,
        attn: original.MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: fused.Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, s, hidden] -> the same shape."""
        if rotary_emb is None:
            return super().__call__(attn, hidden_states, None, attention_mask)
        layers = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in layers)
        query, key = fused.normed_and_partly_rotated(query, key, (attn.norm_q, attn.norm_k), rotary_emb)
        backend, parallel = self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))


class Positions(original.MiniMaxH3RotaryPosEmbed):
    """diffusers' tables, as a `fused.Rotation`."""

    def forward(self, position_ids: torch.Tensor) -> fused.Rotation:
        """[s, 3] -> [1, s, 1, r / 2, 2, 2], for the r channels of a head that are turned."""
        cos, sin = (table.chunk(2, dim=-1)[0][None, :, None] for table in super().forward(position_ids))
        return fused.rotation(cos, sin)


class OutputNorm(nn.Module):
    """The last norm, whose modulation depends on time and not on the kind of token."""

    def __init__(self, published: original.MiniMaxH3AdaLayerNormOut):
        super().__init__()
        self.norm, self.linear = published.norm, published.linear

    def forward(self, hidden_states: torch.Tensor, times: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] -> the same shape. `levels` [s]: each token's row among `times`."""
        shift, scale = self.linear(times).chunk(2, dim=-1)
        return torch.addcmul(shift[levels], self.norm(hidden_states), (1 + scale)[levels])


class MiniMaxH3Transformer3DModel(original.MiniMaxH3Transformer3DModel):
    """Constructor arguments as diffusers' class, `adaln_curve_grid`: rows of a pruned file's table, else None, and
    `gate_compress`: the blocks have FastH3's layer for video sparse attention."""

    @extends(original.MiniMaxH3Transformer3DModel)
    def __init__(self, *, adaln_curve_grid: int | None = None, gate_compress: bool = False, **published: Any):
        super().__init__(**published)
        if adaln_curve_grid is not None:
            del self.time_embedder
            self.adaln_t_table = nn.Parameter(torch.zeros(adaln_curve_grid, self.config["time_embed_dim"]))
        self.rope.__class__ = Positions
        blocks: Any = self.transformer_blocks
        for block in blocks:
            block.__class__ = Block
            block.attn.set_processor(Attention())
            if gate_compress:  # read by rank/attention, and by nobody where attention is in full
                block.attn.to_gate_compress = nn.Linear(self.config["hidden_size"], block.attn.inner_dim, bias=False)
        self.norm_out = OutputNorm(self.norm_out)

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        audio_hidden_states: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        timestep: torch.Tensor,
        levels: torch.Tensor,
        kinds: torch.Tensor,
        position_ids: torch.Tensor,
        sound: slice,
        text_span: slice,
        video: slice,
        sound_references: torch.Tensor | None,
        runs: fused.Runs | None,
        dtype: torch.dtype,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Negative velocities, as samplers subtract them: of the video's tokens [b, n, c], references included, and the
        sound's [b, a, d].

        The s tokens are `sound`, the text's, then `video`. `hidden_states` [b, n, c]: of these, `sound_references` are a
        reference's sound. None: the blocks' inputs are zeros. `audio_hidden_states` [b, a, d or wider].
        `encoder_hidden_states` [b, t, text width]: the whole text, of which `text_span` runs through the blocks. `timestep`
        [l] float32: 0 (noise) to 1. `levels` [s]: each token's index in `timestep`. `kinds` [s]: see KINDS. `position_ids`
        [s, 3] float32. `runs`: see Block. `dtype`: that of the blocks.
        """
        rotary_emb, times = self.rope(position_ids), self._times(timestep, dtype)
        if hidden_states is None:
            x = times.new_zeros(1, len(levels), self.config["hidden_size"], dtype=dtype)
        else:
            tokens = self._embed(hidden_states, audio_hidden_states, encoder_hidden_states, text_span, sound_references)
            x = torch.cat([part.to(dtype) for part in tokens], dim=1)
        rows = levels * KINDS + kinds
        for block in self.transformer_blocks:
            x = block(x, times, rows, rotary_emb, runs)
        heads = (self.proj_out, video), (self.audio_proj_out, sound)
        out = [head(self.norm_out(x[:, part], times, levels[part]).to(head.weight.dtype)) for head, part in heads]
        return -out[0], -out[1]

    def _times(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[l] -> [l, time width], the input of modulations: an activated embedding in `dtype`, or a row of the table."""
        if (table := getattr(self, "adaln_t_table", None)) is None:
            embedding = self.time_embedder(self.time_proj(timestep).to(self.time_embedder.linear_1.weight.dtype))
            return F.silu(embedding).to(dtype)
        row = timestep.clamp(0.0, 1.0) * (len(table) - 1)
        below = row.floor().long().clamp(max=len(table) - 2)
        return torch.lerp(table[below], table[below + 1], (row - below).to(table.dtype)[:, None])

    def _embed(self, video, sound, text, text_span, sound_references) -> list[torch.Tensor]:
        """Embedded tokens of sound, text and video, [b, ., hidden] each, in the dtype of each layer."""
        width, dtype = self.config["audio_in_channels"], self.audio_proj_in.weight.dtype
        parts = [self.audio_proj_in(sound[..., :width].to(dtype))]
        if text is not None and text.shape[1]:
            parts.append(self.token_refiner(self.context_embedder(text))[:, text_span])
        image = self.proj_in(video.to(self.proj_in.weight.dtype))
        if sound_references is not None:
            image[:, sound_references] = self.audio_proj_in(video[:, sound_references, :width].to(dtype))
        return [*parts, image]
