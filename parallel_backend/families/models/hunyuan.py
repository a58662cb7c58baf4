"""HunyuanVideo 1.5 and HunyuanImage 2.1 for unpadded text, as in ComfyUI: diffusers' classes with other forwards.

diffusers' forwards sort padded text by a mask, entry by entry, for which the host waits in each micro-step, and the video's
makes a mask of all tokens by all tokens for every block.
"""

import functools

import torch
from diffusers.models.transformers import transformer_hunyuan_video15 as video15
from diffusers.models.transformers import transformer_hunyuanimage as image


class HunyuanVideo15Transformer3DModel(video15.HunyuanVideo15Transformer3DModel):
    """HunyuanVideo 1.5. Text: [picture, ByT5 text, text]; an embedding of its kind is added to each."""

    @functools.wraps(video15.HunyuanVideo15Transformer3DModel.__init__)  # the class's arguments are read from it
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        for block in self.transformer_blocks:
            block.attn.processor = image.HunyuanImageAttnProcessor()  # the same arithmetic without the mask

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_2: torch.Tensor | None = None,
        image_embeds: torch.Tensor | None = None,
        timestep_r: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Latent [b, C, T, H, W], time [b], text [b, t, w], ByT5 text, CLIP's tokens and the next time, if any -> [b, c, T,
        H, W]."""
        frames, rows, columns = hidden_states.shape[2:]
        rotary, temb = self.rope(hidden_states), self.time_embed(timestep, timestep_r)
        kinds = self.cond_type_embed.weight
        text = self.context_embedder(encoder_hidden_states, timestep) + kinds[0]
        if encoder_hidden_states_2 is not None:
            text = torch.cat((self.context_embedder_2(encoder_hidden_states_2) + kinds[1], text), dim=1)
        if image_embeds is not None:
            text = torch.cat((self.image_embedder(image_embeds) + kinds[2], text), dim=1)
        hidden_states = self.x_embedder(hidden_states)
        for block in self.transformer_blocks:
            hidden_states, text = block(hidden_states, text, temb, None, rotary)
        out = self.proj_out(self.norm_out(hidden_states, temb))
        return (out.mT.unflatten(2, (frames, rows, columns)),)


class HunyuanImageTransformer2DModel(image.HunyuanImageTransformer2DModel):
    """HunyuanImage 2.1. Text: [ByT5 text, text]."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_2: torch.Tensor | None = None,
        timestep_r: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Latent [b, C, (T,) H, W], time [b], text [b, t, w], ByT5 text, next time, guidance [b], if any -> [b, c, ...]."""
        sizes, rotary = hidden_states.shape[2:], self.rope(hidden_states)
        temb = self.time_guidance_embed(timestep, timestep_r, guidance)
        text = self.context_embedder(encoder_hidden_states, timestep)
        if encoder_hidden_states_2 is not None:
            text = torch.cat((self.context_embedder_2(encoder_hidden_states_2), text), dim=1)
        hidden_states = self.x_embedder(hidden_states)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            hidden_states, text = block(hidden_states, text, temb, attention_mask=None, image_rotary_emb=rotary)
        out = self.proj_out(self.norm_out(hidden_states, temb))
        return (out.mT.unflatten(2, sizes),)
