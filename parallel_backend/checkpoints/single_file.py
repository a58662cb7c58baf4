"""A single file's tensors under their names in ComfyUI's class: without the prefix, and with what belongs to each weight."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_backend.core.setup import Conversion
from parallel_backend.core.short_text import short

from .attention_preferences import take_preferences
from .conversion import convert
from .other_models import OtherModel, other_model
from .quantised_layers import MARKER, attach_quantisation
from .tensor_files import GGUF, SAFETENSORS, Entry, read_header

NAMED = "model_name: "
"""Beginning of a refusal: the widget's name."""
MAX_REFUSAL = 1000
"""Most characters of a refusal. The longest show three keys."""
PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
"""In the order in which ComfyUI counts them: each key counts for the first that it begins with."""
OTHER_PREFIX = "model."
FEWEST = 6
"""Keys with one of PREFIXES by which ComfyUI takes it for the file's."""
FOREIGN = {
    ".quant_state.bitsandbytes__nf4": "bitsandbytes (NF4)",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes (FP4)",
    ".SCB": "bitsandbytes (int8)",
    ".wscales": "Nunchaku (SVDQuant)",
    ".qzeros": "GPTQ or AWQ",
}
"""Ending of a key -> who quantises weights that way. ComfyUI reads none of them."""
KINDS = (
    ("a LoRA", "Load LoRA", (".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".hada_w", ".lokr_w", "lora_up.weight")),
    ("a ControlNet", "Load ControlNet Model", ("control_model.", "controlnet_", "input_hint_block.", "zero_conv")),
    ("a VAE", "Load VAE", ("decoder.conv_in.", "encoder.conv_in.", "decoder.conv1.", "first_stage_model.", "taesd_decoder")),
    ("a text encoder", "Load CLIP", ("text_model.encoder.", "encoder.block.0.", "token_embd.", "model.layers.0.self_attn.")),
)
"""(what a file is, the node that loads it, parts of keys that show it), in the order in which they are looked for."""


@dataclass(frozen=True)
class Contents:
    """What the header of a single file says."""

    path: Path
    entries: dict[str, Entry]
    """Key, without the prefix -> tensor."""
    stated: dict[str, Any] | None
    """The model's configuration. None: there is one that cannot be read."""
    attention: dict[str, str]
    """See take_preferences."""
    conversion: Conversion = ()
    """By which the entries of a file in diffusers' layout have ComfyUI's names."""

    @property
    def name(self) -> str:
        """The file's, to show."""
        return short(self.path.name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By key."""
        return {key: entry.shape for key, entry in self.entries.items()}

    def converted(self, conversion: Conversion) -> "Contents":
        """With entries under the names of ComfyUI's layout. ValueError as `convert`."""
        return replace(self, entries=convert(self.name, self.entries, conversion), conversion=conversion)

    @property
    def other(self) -> OtherModel | None:
        """What the file is, if that is known and no model that ranks usually run."""
        return other_model(self.entries)

    def refusal(self) -> ValueError:
        """Of a file that ranks cannot run: what it is, and what to do with it."""
        if (other := self.other) is not None:
            return ValueError(
                f"model_name: {self.name} is {other.name}, {other.what}. Load it with ComfyUI's own loader, on one GPU."
            )
        is_kind = (
            f"It is {what}: use {node}."
            for what, node, parts in KINDS
            if any(p in key for key in self.entries for p in parts)
        )
        usual = "If ComfyUI's Load Diffusion Model loads it, use that node, on one GPU."
        return ValueError(
            f"model_name: {self.name} is not a diffusion transformer that this version knows. {next(is_kind, usual)} "
            f"Its first keys: {', '.join(map(short, list(self.entries)[:3])) or 'none'}."
        )


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Context whose errors become a ValueError that names the file, in a line of at most MAX_REFUSAL characters.

    Their causes are left out: whoever logs an error logs its causes, with all that the file has put into them.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError, RecursionError) as error:
        name, said = short(path.name), str(error)
        if not isinstance(error, ValueError) or not said.startswith(NAMED):
            said = (
                f"{name} does not match its tensor names: its tensors or settings do not fit each other "
                f"({type(error).__name__}: {short(said)})."
            )
        said = said.removeprefix(NAMED) if name in said else f"{name}: {said.removeprefix(NAMED)}"
        raise ValueError(NAMED + short(said, MAX_REFUSAL)).with_traceback(error.__traceback__) from None


def prefix_of(keys: Iterable[str]) -> str:
    """The prefix of the transformer's keys, by ComfyUI's rules. Empty if there is none."""
    keys = list(keys)
    if all(any(key.startswith(part) for key in keys) for part in ("detector.", "tracker.")):  # SAM 3 has two of its own
        return ""
    counts = dict.fromkeys(PREFIXES, 0)
    for key in keys:
        if (prefix := next((each for each in PREFIXES if key.startswith(each)), None)) is not None:
            counts[prefix] += 1
    top = max(counts, key=lambda prefix: counts[prefix])
    prefix = top if counts[top] >= FEWEST else OTHER_PREFIX
    return prefix if any(key.startswith(prefix) for key in keys) else ""


def contents_of(path: Path) -> Contents:
    """What the file's header says.

    ValueError for no file, one of another kind, and for weights that are packed in a way that ComfyUI does not read.
    """
    name = short(path.name)
    if not path.is_file():  # reading a pipe could block for ever
        raise ValueError(f"model_name: {name} does not exist at {short(path.parent, 300)}.")
    if path.suffix.lower() not in SAFETENSORS + GGUF:
        raise ValueError(
            f"model_name: {name} is not a .safetensors, .sft or .gguf file. Pickled checkpoints are never opened."
        )
    stored, stated, config = read_header(path)
    prefix = prefix_of(stored)
    entries = {key.removeprefix(prefix): entry for key, entry in stored.items() if key.startswith(prefix)}
    if prefix and MARKER in stored:  # ComfyUI looks for it before and after it takes the prefix away
        entries.setdefault(MARKER, stored[MARKER])
    for ending, maker in FOREIGN.items():
        if any(key.endswith(ending) for key in entries):
            raise ValueError(
                f"model_name: {name} is quantised by {maker}, which neither ComfyUI nor Parallel DiT reads. Use a bf16, "
                "fp8 or GGUF file of the same model, or the nodes that were made for this file."
            )
    stated = {layer.removeprefix(prefix): settings for layer, settings in stated.items()}
    entries, attention = take_preferences(name, entries)
    return Contents(path, with_values(name, attach_quantisation(name, entries, stated)), config, attention)


def with_values(name: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    """`entries`, checked. ValueError for a matrix without values, which could claim any size. Empty vectors are markers."""
    empty = next((key for key, entry in entries.items() if 0 in entry.shape and len(entry.shape) > 1), None)
    if empty is not None:
        shape = short(list(entries[empty].shape))
        raise ValueError(f"model_name: {name} has {short(empty)} of shape {shape}, which has no values.")
    return entries
