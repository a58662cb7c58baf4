"""Key map of PixArt's original layout, which Sana has too."""

from parallel_backend.families.base.step_inputs import Config

from .conditioning import hidden
from .key_map import KeyMap

UNUSED = ("pos_embed", r"y_embedder\.y_embedding")
"""`FileLayout.ignored`: a table of positions, which the class computes, and the text of prompts dropped in training."""


def model_keys(config: Config, patches: str, times: str) -> KeyMap:
    """The modules around the blocks. `patches`, `times`: the class's names of its patch and its time embedding."""
    keys = KeyMap()
    keys.copy({f"{patches}.proj": "x_embedder.proj", f"{times}.linear": "t_block.1", "proj_out": "final_layer.linear"})
    keys.copy({f"{times}.emb.timestep_embedder.linear_{index}": f"t_embedder.mlp.{2 * index - 2}" for index in (1, 2)})
    keys.copy({f"caption_projection.linear_{index}": f"y_embedder.y_proj.fc{index}" for index in (1, 2)})
    keys.tensor("scale_shift_table", "final_layer.scale_shift_table")
    return keys


def block_keys(keys: KeyMap, config: Config, index: int) -> KeyMap:
    """Adds block `index` without its feed-forward. Returns the collection for modules inside the block."""
    block, width = keys.inside(f"transformer_blocks.{index}.", f"blocks.{index}."), hidden(config)
    block.tensor("scale_shift_table")
    parameters = ("weight", "bias") if config["attention_bias"] else ("weight",)
    block.split("attn.qkv", {f"attn1.to_{part}": width for part in "qkv"}, parameters)
    block.split("cross_attn.kv_linear", {f"attn2.to_{part}": width for part in "kv"})
    block.copy({"attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj"})
    return block
