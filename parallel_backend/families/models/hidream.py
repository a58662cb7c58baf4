"""HiDream-I1's forward on tokens: diffusers' HiDreamImageTransformer2DModel with a forward of our own.

diffusers' takes a latent, and pads one that is not square to the largest picture, whose empty tokens are then seen. This one
takes tokens with their positions, of any number, as ComfyUI's does (comfy/ldm/hidream).
"""

import diffusers
import torch
import torch.nn.functional as F


class HiDreamImageTransformer2DModel(diffusers.HiDreamImageTransformer2DModel):
    """See the module. Llama's tokens are a part of the text that each block replaces by its own layer's."""

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
        """Picture [b, n, 4 C], channels last; time [b]; pooled text [b, p]; T5's tokens [b, t, w], those of Llama's last
        layer [b, s, w], and those of all its layers [b, layers, u, w]; rows and columns [n, 2] float32 -> [b, n, 4 C].
        """
        layers = self.config.llama_layers
        temb = self.t_embedder(timesteps, pooled_embeds.dtype) + self.p_embedder(pooled_embeds)
        *projections, last, of_t5 = self.caption_projection
        projections.append(last)
        own = [project(encoder_hidden_states_llama3[:, layer]) for project, layer in zip(projections, layers, strict=True)]
        text = torch.cat((of_t5(encoder_hidden_states_t5), last(encoder_hidden_states_last)), dim=1)
        pixels, kept, words = len(image_positions), text.shape[1], text.shape[1] + own[0].shape[1]
        ids = F.pad(image_positions, (1, 0, 0, words))[None]
        joint = {"temb": temb, "image_rotary_emb": self.pe_embedder(ids)}
        image, done = self.x_embedder(hidden_states), len(self.double_stream_blocks)
        for block, llama in zip(self.double_stream_blocks, own[:done], strict=True):
            text = torch.cat((text[:, :kept], llama), dim=1)
            image, text = block(hidden_states=image, encoder_hidden_states=text, **joint)
        both = torch.cat((image, text), dim=1)
        for block, llama in zip(self.single_stream_blocks, own[done:], strict=True):
            both = block(hidden_states=torch.cat((both[:, : pixels + kept], llama), dim=1), **joint)
        return (self.final_layer(both[:, :pixels], temb),)
