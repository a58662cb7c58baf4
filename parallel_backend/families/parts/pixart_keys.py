"""The original key layout of PixArt, which Sana has too."""

from parallel_backend.families.base.step_inputs import Config

from .conditioning import hidden
from .key_map import KeyMap

UNUSED = ("pos_embed", r"y_embedder\.y_embedding")
"""KeyMap (regular expressions) of a file for which no class has a use: a table of positions, text that was left out."""


def model_keys(config: Config, patches: str, times: str) -> KeyMap:
    """What surrounds the blocks. `patches`, `times`: the class's names of its patch and time embedding."""
    keys = KeyMap()
    keys.copy({f"{patches}.proj": "x_embedder.proj", f"{times}.linear": "t_block.1", "proj_out": "final_layer.linear"})
    keys.copy({f"{times}.emb.timestep_embedder.linear_{index}": f"t_embedder.mlp.{2 * index - 2}" for index in (1, 2)})
    keys.copy({f"caption_projection.linear_{index}": f"y_embedder.y_proj.fc{index}" for index in (1, 2)})
    keys.tensor("scale_shift_table", "final_layer.scale_shift_table")
    return keys


def block_keys(keys: KeyMap, config: Config, index: int) -> KeyMap:
    """Block `index` but for its feed-forward, added to `keys`; the same collection, for modules inside it."""
    block, width = keys.inside(f"transformer_blocks.{index}.", f"blocks.{index}."), hidden(config)
    block.tensor("scale_shift_table")
    parameters = ("weight", "bias") if config["attention_bias"] else ("weight",)
    block.split("attn.qkv", {f"attn1.to_{part}": width for part in "qkv"}, parameters)
    block.split("cross_attn.kv_linear", {f"attn2.to_{part}": width for part in "kv"})
    block.copy({"attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj"})
    return block
