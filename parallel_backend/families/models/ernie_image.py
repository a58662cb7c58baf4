"""ERNIE-Image's transformer on tokens: diffusers' layers and names, with the batch first and positions as an argument."""

import functools
from typing import Any

import torch
from diffusers.models.transformers import transformer_ernie_image as original


class _Positions(original.ErnieImageEmbedND3):
    """diffusers' module without its autocast."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, n, 3] float32 -> angles [1, n, 1, head size]. Each angle occurs twice, for two neighbouring channels."""
        parts = []
        for axis, width in enumerate(self.axes_dim):
            powers = torch.arange(0, width, 2, dtype=torch.float32, device=ids.device) / width
            parts.append(ids[..., axis, None] / self.theta**powers)
        return torch.cat(parts, dim=-1).repeat_interleave(2, dim=-1)[:, :, None]


class _PatchEmbed(original.ErnieImagePatchEmbedDynamic):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, n, c] -> [b, n, hidden]: patches are single latent pixels."""
        return super().forward(tokens.transpose(1, 2).unsqueeze(-1))


class _Block(original.ErnieImageSharedAdaLNBlock):
    def forward(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor, temb: Any) -> torch.Tensor:
        """[b, n, hidden] -> the same shape. `temb`: six of [1, b, hidden]. diffusers' block takes [n, b, hidden]."""
        return super().forward(x.transpose(0, 1), rotary_pos_emb, temb).transpose(0, 1)


class ErnieImageTransformer2DModel(original.ErnieImageTransformer2DModel):
    """Joint sequence [image, text], without a text mask."""

    @functools.wraps(original.ErnieImageTransformer2DModel.__init__)
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.x_embedder.__class__, self.pos_embed.__class__ = _PatchEmbed, _Positions
        for layer in self.layers:
            layer.__class__ = _Block

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Tokens [b, n, in_channels], timestep [b] of 0 ... 1000, text [b, t, text_in_dim], float32 positions [n + t, 3] ->
        ([b, n, out_channels],)."""
        assert not return_dict
        text = encoder_hidden_states if self.text_proj is None else self.text_proj(encoder_hidden_states)
        x = torch.cat((self.x_embedder(hidden_states), text), dim=1)
        rotary = self.pos_embed(position_ids[None])
        embedded = self.time_embedding(self.time_proj(timestep).to(x.dtype))
        temb = [part[None] for part in self.adaLN_modulation(embedded).chunk(6, dim=-1)]
        for layer in self.layers:
            x = layer(x, rotary, temb)
        x = self.final_norm(x.transpose(0, 1), embedded).type_as(x).transpose(0, 1)
        return (self.final_linear(x[:, : hidden_states.shape[1]]),)
