"""LTX-2's connectors: two small transformers, for video and sound, that a prompt's text passes once.

They are in the transformer's file and as large as some of its blocks. Every block needs their output, so they run in
ComfyUI's process, one block in memory at a time. Arithmetic: comfy/ldm/lightricks/embeddings_connector.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..base.family import TextModel, TextWeights
from ..base.step_inputs import Config

STREAMS = ("video", "audio")
PREFIXES = tuple(f"{stream}_embeddings_connector." for stream in STREAMS)
HEADS = "connector_num_attention_heads"
USUAL_HEADS = 30
LEAST_TOKENS = 1024
"""Shorter texts are padded to this length with learned tokens (registers)."""
QUERY_KEY_EPS = 1e-5
SETTINGS: Mapping[str, Callable[[Config], Any]] = {
    HEADS: lambda _config: USUAL_HEADS,
    f"audio_{HEADS}": lambda _config: None,  # as many as the video's
}
HEADER: Mapping[str, Callable[[Config], tuple[Any, ...]]] = {
    "connector_positional_embedding_max_pos": lambda _config: ((4096,),),
    "connector_norm_output": lambda _config: (True,),
    "use_embeddings_connector": lambda _config: (True,),
}
_NAMES = {"attn1.q_norm.": "attn1.norm_q.", "attn1.k_norm.": "attn1.norm_k."}  # original -> diffusers


def through_connectors(config: Config, weights: TextWeights, text: torch.Tensor, unprocessed: bool = False) -> torch.Tensor:
    """The text encoder's output [B, T, C] -> the blocks' text [B, T', V + A]: channels for the video, then for the sound.

    Text that has already passed connectors is returned unchanged. `unprocessed`: the encoder marks it as not having passed.
    """
    both = config["cross_attention_dim"] + config["audio_cross_attention_dim"]
    if not unprocessed and text.shape[-1] in (both, 2 * config["caption_channels"]):
        return text
    parts = (text, text)
    if text.shape[-1] == both:
        parts = text.split((config["cross_attention_dim"], config["audio_cross_attention_dim"]), dim=-1)
    heads = config[HEADS], config[f"audio_{HEADS}"] or config[HEADS]
    streams = zip(PREFIXES, heads, parts, strict=True)
    return torch.cat([_connector(weights, prefix, count, config, part) for prefix, count, part in streams], dim=-1)


@torch.inference_mode()
def _connector(weights: TextWeights, prefix: str, heads: int, config: Config, x: torch.Tensor) -> torch.Tensor:
    from diffusers.pipelines.ltx2.connectors import LTX2RotaryPosEmbed1d, LTX2TransformerBlock1d

    registers = weights(f"{prefix}learnable_registers").get("")
    if registers is None:
        raise ValueError(
            "model_name: this LTX-2 model comes without its connectors, which a prompt's text has to go through. Use a "
            "single file that has them (keys video_embeddings_connector.*)."
        )
    batch, tokens, width = x.shape
    repeats = -(-max(LEAST_TOKENS, tokens) // len(registers))
    x = torch.cat((x, registers.repeat(repeats, 1)[tokens:].expand(batch, -1, -1)), dim=1)
    kind = {"num_attention_heads": heads, "rope_type": config["rope_type"]}
    tables = LTX2RotaryPosEmbed1d(width, **kind)(batch, x.shape[1], device=x.device)
    number = 0
    while tensors := weights(f"{prefix}transformer_1d_blocks.{number}."):
        with torch.device("meta"):  # load_state_dict assigns the tensors, so the block allocates none
            gated = "attn1.to_gate_logits.weight" in tensors
            block = LTX2TransformerBlock1d(width, attention_head_dim=width // heads, apply_gated_attention=gated, **kind)
        for theirs, ours in _NAMES.items():
            tensors = {key.replace(theirs, ours): tensor for key, tensor in tensors.items()}
        block.load_state_dict(tensors, assign=True)
        block.attn1.norm_q.eps = block.attn1.norm_k.eps = QUERY_KEY_EPS
        x = block(x, rotary_emb=tables)
        number += 1
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


TEXT_MODEL = TextModel(PREFIXES, through_connectors)
