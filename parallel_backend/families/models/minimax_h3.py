"""MiniMax H3 as ComfyUI's files have it: diffusers' class, with the timestep's embedding as a table too, and called with
some of the tokens.

Pruned files have no time embedding. Their adaLN layers read the coordinates of the embedding's curve, which they have in a
table over time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import MiniMaxH3Transformer3DModel as Published
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock
from torch import nn

from parallel_backend.families.parts.minimax_conditioning import KINDS

from .constructors import extends


class Block(MiniMaxH3TransformerBlock):
    """diffusers' block, whose modulation may be in float32."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        times: torch.Tensor,
        rows: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[b, s, hidden] -> the same shape. `times` [t, time width]; `rows` [s]: each token's time and kind, t * KINDS."""
        modulation = self.adaln_proj.linear(times).to(hidden_states.dtype)
        vectors = modulation.view(-1, 6 * hidden_states.shape[-1]).chunk(6, dim=-1)  # a row for each time and kind
        for part, (shift, scale, gate) in ((self._attend, vectors[:3]), (self._feed_forward, vectors[3:])):
            out = part(hidden_states, 1 + scale[rows], shift[rows], rotary_emb)
            hidden_states = torch.addcmul(hidden_states, gate[rows], out)
        return hidden_states

    def _attend(self, x, scale, shift, rotary_emb):
        return self.attn(torch.addcmul(shift, self.norm1(x), scale), rotary_emb)

    def _feed_forward(self, x, scale, shift, _rotary_emb):
        return self.ff(torch.addcmul(shift, self.norm2(x), scale))


class OutputNorm(nn.Module):
    """The last norm, modulated by time alone."""

    def __init__(self, published: nn.Module):
        super().__init__()
        self.norm, self.linear = published.norm, published.linear

    def forward(self, hidden_states: torch.Tensor, times: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] -> the same shape. `levels` [s]: each token's row among `times`."""
        shift, scale = self.linear(times).chunk(2, dim=-1)
        return self.norm(hidden_states) * (1 + scale[levels]) + shift[levels]


class MiniMaxH3Transformer3DModel(Published):
    """`adaln_curve_grid`: rows of the table of pruned files. None: the time is embedded. Else as diffusers' class."""

    @extends(Published)
    def __init__(self, *, adaln_curve_grid: int | None = None, **published: Any):
        super().__init__(**published)
        if adaln_curve_grid is not None:
            del self.time_embedder
            self.adaln_t_table = nn.Parameter(torch.zeros(adaln_curve_grid, self.config.time_embed_dim))
        for block in self.transformer_blocks:
            block.__class__ = Block
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
        dtype: torch.dtype,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What samplers take away: minus the velocity of the video's tokens [b, n, c], with those of references among them,
        and of the sound's [b, a, d].

        Of s tokens `sound` come first, then those of the text, then `video`. `hidden_states` [b, n, c], of which
        `sound_references` are a reference's sound; `audio_hidden_states` [b, a, d and more]; `encoder_hidden_states`
        [b, t, text width]: the whole text, of which `text_span` run through the blocks. `timestep` [l] float32: 0 (noise) to
        1; `levels` [s]: each token's place in it; `kinds` [s]: see KINDS; `position_ids` [s, 3] float32. `dtype`: of the
        blocks.
        Where `hidden_states` are None, the blocks' inputs are zeros.
        """
        rotary_emb, times = self.rope(position_ids), self._times(timestep, dtype)
        if hidden_states is None:
            x = times.new_zeros(1, len(levels), self.config.hidden_size, dtype=dtype)
        else:
            tokens = self._embed(hidden_states, audio_hidden_states, encoder_hidden_states, text_span, sound_references)
            x = torch.cat([part.to(dtype) for part in tokens], dim=1)
        rows = levels * KINDS + kinds
        for block in self.transformer_blocks:
            x = block(x, times, rows, rotary_emb)
        heads = (self.proj_out, video), (self.audio_proj_out, sound)
        out = [head(self.norm_out(x[:, part], times, levels[part]).to(head.weight.dtype)) for head, part in heads]
        return -out[0], -out[1]

    def _times(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[l] -> [l, time width] as the modulations take it: in their dtype, and activated if it is an embedding."""
        if (table := getattr(self, "adaln_t_table", None)) is None:
            embedding = self.time_embedder(self.time_proj(timestep).to(self.time_embedder.linear_1.weight.dtype))
            return F.silu(embedding).to(dtype)
        place = timestep.clamp(0.0, 1.0) * (len(table) - 1)
        below = place.floor().long().clamp(max=len(table) - 2)
        return torch.lerp(table[below], table[below + 1], (place - below).to(table.dtype)[:, None])

    def _embed(self, video, sound, text, text_span, sound_references) -> list[torch.Tensor]:
        """The tokens of the sound, the text and the video, [b, ., hidden] each."""
        width, dtype = self.config.audio_in_channels, self.audio_proj_in.weight.dtype
        parts = [self.audio_proj_in(sound[..., :width].to(dtype))]
        if text is not None and text.shape[1]:
            parts.append(self.token_refiner(self.context_embedder(text))[:, text_span])
        image = self.proj_in(video.to(self.proj_in.weight.dtype))
        if sound_references is not None:
            image[:, sound_references] = self.audio_proj_in(video[:, sound_references, :width].to(dtype))
        return [*parts, image]
