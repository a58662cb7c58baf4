"""A custom node pack for tests only, without a node: ComfyUI's text encoder classes take their sizes from the file.

ComfyUI has the sizes of CLIP-L, CLIP-G and T5-XXL in configuration files, and reads from a checkpoint only how many
positions a CLIP has, in `model_options_long_clip`. Here it reads the other sizes at the same place. Loaders, tokenizers,
classes and key layouts stay ComfyUI's own.
"""

import comfy.text_encoders.long_clipl
import comfy.text_encoders.t5
import torch

T5_WIDTH = 4096
NODE_CLASS_MAPPINGS = {}
read_positions = comfy.text_encoders.long_clipl.model_options_long_clip


def sizes(state):
    """(name, configuration entries) of an encoder's tensors; None for what is neither a CLIP nor a T5."""
    if "shared.weight" in state:
        heads = state["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].shape[1]
        return "t5xxl", {
            "d_model": state["shared.weight"].shape[1],
            "d_ff": state["encoder.block.0.layer.1.DenseReluDense.wi_1.weight"].shape[0],
            "d_kv": state["encoder.block.0.layer.0.SelfAttention.q.weight"].shape[0] // heads,
            "num_heads": heads,
        }
    if "text_model.embeddings.token_embedding.weight" in state:
        width = state["text_model.embeddings.token_embedding.weight"].shape[1]
        return "clip_g" if "text_model.encoder.layers.30.mlp.fc1.weight" in state else "clip_l", {
            "hidden_size": width,
            "intermediate_size": state["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
            "num_attention_heads": width // 64,
        }
    return None


def read_sizes(state, tokenizer_data, model_options):
    tokenizer_data, model_options = read_positions(state, tokenizer_data, model_options)
    if (found := sizes(state)) is not None:
        name, entries = found
        key = f"{name}_model_config"
        model_options = {**model_options, key: {**model_options.get(key, {}), **entries}}
    return tokenizer_data, model_options


class WideT5(comfy.text_encoders.t5.T5):
    """Its output has zeros up to the real width, which ComfyUI's SD3 class counts on when it joins T5's with CLIP's."""

    def forward(self, *arguments, **keywords):
        out, intermediate = super().forward(*arguments, **keywords)
        return torch.nn.functional.pad(out, (0, T5_WIDTH - out.shape[-1])), intermediate


comfy.text_encoders.long_clipl.model_options_long_clip = read_sizes
comfy.text_encoders.t5.T5 = WideT5
