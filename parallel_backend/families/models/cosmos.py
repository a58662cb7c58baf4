"""Cosmos Predict2's forward: diffusers' CosmosTransformer3DModel without torchvision, by which it fits a padding mask."""

import diffusers
import torch
import torch.nn.functional as F
from einops import rearrange


class CosmosTransformer3DModel(diffusers.CosmosTransformer3DModel):
    """Nothing of a latent is padding, so the channel that would say so is zero."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Latent [b, C, T, H, W], time [b] or of each frame [b, T], text [b, t, w] -> [b, c, T, H, W]."""
        rows, columns = (size // 2 for size in hidden_states.shape[-2:])
        rotary = self.rope(hidden_states)
        tokens = self.patch_embed(F.pad(hidden_states, (0, 0, 0, 0, 0, 0, 0, 1))).flatten(1, 3)
        times = self.time_embed(tokens, timestep.flatten())
        if timestep.ndim == 2:
            times = (each.unflatten(0, timestep.shape).repeat_interleave(rows * columns, dim=1) for each in times)
        temb, embedded = times
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states, embedded, temb, rotary)
        out = self.proj_out(self.norm_out(tokens, embedded, temb))
        return (rearrange(out, "b (t h w) (p q c) -> b c t (h p) (w q)", h=rows, w=columns, p=2, q=2),)
