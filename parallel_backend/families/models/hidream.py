"""HiDream-I1's transformer on tokens: diffusers' HiDreamImageTransformer2DModel with another forward.

diffusers' forward pads a latent that is not square to the largest picture, and attention sees the padding. This forward
takes any number of tokens with their positions, as ComfyUI's does (comfy/ldm/hidream).
"""

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_hidream_image as original


class HiDreamImageTransformer2DModel(original.HiDreamImageTransformer2DModel):
    """diffusers' class on tokens. Each block replaces the end of the text by tokens of another of Llama's layers."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        timesteps: torch.Tensor,
        pooled_embeds: torch.Tensor,
        encoder_hidden_states_t5: torch.Tensor,
        encoder_hidden_states_last: torch.Tensor,
        encoder_hidden_states_llama3: torch.Tensor,
        image_positions: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Picture [b, n, 4 C], channels last; time [b]; pooled text [b, p]; tokens of T5 [b, t, w], of Llama's last layer
        [b, s, w], and of all its layers [b, layers, u, w]; rows and columns [n, 2] float32 -> [b, n, 4 C].
        """
        layers = self.config["llama_layers"]
        temb = self.t_embedder(timesteps, pooled_embeds.dtype) + self.p_embedder(pooled_embeds)
        *projections, last, of_t5 = self.caption_projection
        projections.append(last)
        llama = [project(encoder_hidden_states_llama3[:, layer]) for project, layer in zip(projections, layers, strict=True)]
        text = torch.cat((of_t5(encoder_hidden_states_t5), last(encoder_hidden_states_last)), dim=1)
        pixels, kept, words = len(image_positions), text.shape[1], text.shape[1] + llama[0].shape[1]
        ids = F.pad(image_positions, (1, 0, 0, words))[None]
        joint = {"temb": temb, "image_rotary_emb": self.pe_embedder(ids)}
        image, done = self.x_embedder(hidden_states), len(self.double_stream_blocks)
        for block, inserted in zip(self.double_stream_blocks, llama[:done], strict=True):
            text = torch.cat((text[:, :kept], inserted), dim=1)
            image, text = block(hidden_states=image, encoder_hidden_states=text, **joint)
        both = torch.cat((image, text), dim=1)
        for block, inserted in zip(self.single_stream_blocks, llama[done:], strict=False):  # timed with fewer blocks
            both = block(hidden_states=torch.cat((both[:, : pixels + kept], inserted), dim=1), **joint)
        return (self.final_layer(both[:, :pixels], temb),)
