"""A single file's tensors under their names in ComfyUI's class: without prefix, each weight with its scales and the like.

Beside an attention layer's weights a file may have a tensor `<layer>.comfy_attention.config` of JSON bytes,
which ComfyUI reads from 0.37 on: an object, or a list of objects. The first of them that can run counts. Its `attention`
names the method (`ComfyAttention` in ComfyUI's comfy/ldm/modules/attention.py). An unknown method is left out, as there.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallel_backend.core.own_class import Conversion
from parallel_backend.core.setup import TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span

from .quantised_layers import MARKER, QUANTISATION, attach_quantisation
from .tensor_files import GGUF, SAFETENSORS, Entry, MappedFile, read_header

NAMED = "model_name: "
"""How an error about the file begins: the widget's name."""
MAX_REFUSAL = 1000
"""Maximum number of characters of such an error. The longest ones show three keys."""
PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
"""Prefixes in the order in which ComfyUI counts them. A key counts for the first prefix that it begins with."""
OTHER_PREFIX = "model."
FEWEST = 6
"""Minimum number of keys with one of PREFIXES for which ComfyUI uses it as the file's prefix."""
FOREIGN = {
    ".quant_state.bitsandbytes__nf4": "bitsandbytes (NF4)",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes (FP4)",
    ".SCB": "bitsandbytes (int8)",
    ".wscales": "Nunchaku (SVDQuant)",
    ".qzeros": "GPTQ or AWQ",
}
"""Ending of a key -> the tool that quantizes weights in that format. ComfyUI reads none of these formats."""
KINDS = (
    ("a LoRA", "Load LoRA", (".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".hada_w", ".lokr_w", "lora_up.weight")),
    ("a ControlNet", "Load ControlNet Model", ("control_model.", "controlnet_", "input_hint_block.", "zero_conv")),
    ("a VAE", "Load VAE", ("decoder.conv_in.", "encoder.conv_in.", "decoder.conv1.", "first_stage_model.", "taesd_decoder")),
    ("a text encoder", "Load CLIP", ("text_model.encoder.", "encoder.block.0.", "token_embd.", "model.layers.0.self_attn.")),
)
"""Tuples (what a file is, the node that loads it, parts of keys that show it), in the order in which they are searched."""
SAMPLING = ("v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")
"""Keys by which ComfyUI recognizes how an SDXL model is sampled; it reads some of their values. They never have a prefix."""
PREDICTS_V = "output_blocks.11.1.transformer_blocks.0.norm1.bias"
"""Key of the values by which ComfyUI recognizes how an SD 2 model is sampled."""
PREFERENCE = ".comfy_attention.config"
KERNELS = {"comfy_kitchen_int8": "comfy_kitchen"}
"""ComfyUI's attention methods -> the ranks' attention kernels (core/attention_kernels.py)."""
MAX_SETTING = 1 << 20
MAX_LIST = 1 << 10
MAX_TEXT = 1 << 10
MAX_UNSEEN = 1 << 12
"""The largest allowed number in the configuration that is not the size of a tensor, such as a text length."""
COUNTED = "layers", "blocks", "depth"
"""Parts of names of settings that count modules. Each such module has at least one tensor."""

UNET = "a UNet whose class in ComfyUI does not run on ranks"
SOUND = "an audio model, which one GPU computes in seconds"
SOLID = "a 3D model, which one GPU computes in seconds"
PICTURE_TOOL = "not a model for samplers"
NOT_RUN = "a diffusion transformer whose class ranks cannot run"


class OtherModel(NamedTuple):
    """A kind of model that ComfyUI loads, but ranks cannot run, or not in all variants. A file with all of `keys` is of this
    kind."""

    name: str
    what: str
    keys: tuple[str, ...]


OTHERS = (
    OtherModel("MiniMax Music 3", SOUND, ("cond_layer_logits", "latent_conditioners.0.weight")),
    OtherModel("Stable Cascade", UNET, ("clf.1.weight",)),
    OtherModel("Stable Cascade", UNET, ("effnet_mapper.0.weight", "clip_mapper.weight")),
    OtherModel("Trellis 2 or Pixal3D", SOLID, ("img2shape.t_embedder.mlp.0.weight",)),
    OtherModel("Trellis 2 or Pixal3D", SOLID, ("shape2txt.t_embedder.mlp.0.weight",)),
    OtherModel("Stable Audio", SOUND, ("transformer.rotary_pos_emb.inv_freq",)),
    OtherModel("ACE-Step", SOUND, ("genre_embedder.weight",)),
    OtherModel("ACE-Step 1.5", SOUND, ("encoder.lyric_encoder.layers.0.input_layernorm.weight",)),
    OtherModel("PiD, a decoder of latents to pixels", NOT_RUN, ("lq_proj.latent_proj.0.weight",)),
    OtherModel("PixelDiT", NOT_RUN, ("core.pixel_embedder.proj.weight",)),
    OtherModel("PixelDiT", NOT_RUN, ("pixel_embedder.proj.weight",)),
    OtherModel("Z-Image in pixel space", NOT_RUN, ("dec_net.cond_embed.weight", "cap_embedder.1.weight")),
    OtherModel("Hunyuan3D 2", SOLID, ("latent_in.weight",)),
    OtherModel("Hunyuan3D 2.1", SOLID, ("x_embedder.weight", "t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight")),
    OtherModel("TripoSplat", SOLID, ("cam_out_layer.weight", "repo_layers.0.final_map.weight")),
    OtherModel("RT-DETR, which finds objects", PICTURE_TOOL, ("encoder.pan_blocks.1.cv4.conv.weight",)),
    OtherModel("Depth Anything 3", PICTURE_TOOL, ("backbone.embeddings.patch_embeddings.projection.weight",)),
    OtherModel("SAM 3, which cuts out objects", PICTURE_TOOL, ("detector.transformer.decoder.query_embed.weight",)),
    OtherModel("a Stable Diffusion (1.5, 2, XL, Video, or made from one)", UNET, ("input_blocks.0.0.weight",)),
)
"""As in ComfyUI 0.33 and later: model_detection.py, supported_models.py. The first row that matches a file is used."""


@dataclass(frozen=True)
class Contents:
    """What the header of a single file contains."""

    path: Path
    entries: dict[str, Entry]
    """Key without the prefix -> its tensor's description."""
    stated: dict[str, Any] | None
    """The model's configuration from the header. Empty: the header has none. None: it cannot be read."""
    attention: dict[str, str]
    """Attention layer -> the attention kernel that the file asks for."""
    file_state: str = ""
    """The state of the file when it was read, see file_state()."""
    sampling: dict[str, torch.Tensor] = field(default_factory=dict)
    """Key -> tensor that ComfyUI reads to find out how a UNet is sampled, see SAMPLING."""
    conversion: Conversion = ()
    """The conversion from diffusers' names to ComfyUI's names that was applied to `entries`. Empty: none."""

    @property
    def name(self) -> str:
        """The file's name for messages."""
        return short(self.path.name)

    def tensors(self, enlarged: TensorSizes = ()) -> dict[str, torch.Tensor]:
        """Return tensors on the meta device, by key. `enlarged`: other sizes of some tensors."""
        shapes = {key: entry.shape for key, entry in self.entries.items()} | dict(enlarged)
        return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}

    @property
    def metadata(self) -> dict[str, str] | None:
        """`stated` in the form that ComfyUI's detection reads. None: the header has no configuration."""
        if self.stated is None:
            return {"config": ""}
        return {"config": json.dumps({"transformer": self.stated})} if self.stated else None

    def converted(self, conversion: Conversion) -> "Contents":
        """Return the contents with entries under the names of ComfyUI's layout, which may combine rows of several tensors.
        Other entries keep their names. Raises ValueError for rows that do not match each other, or that are packed with
        scales."""
        used = {each for _, rows in conversion for each, *_ in rows}
        entries = {key: entry for key, entry in self.entries.items() if key not in used}
        for key, rows in conversion:
            entries[key] = _joined(self.name, key, [(self.entries[each], Span(*span)) for each, *span in rows])
        return replace(self, entries=entries, conversion=conversion)

    @property
    def other(self) -> OtherModel | None:
        """The entry of OTHERS that the file belongs to, or None. Ranks cannot run such models, or not in all variants."""
        return next((each for each in OTHERS if all(key in self.entries for key in each.keys)), None)

    def refusal(self) -> ValueError:
        """Return the error for a file that ranks cannot run. It says what the file is, and what to do."""
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
    """Context whose errors become a ValueError that names the file, in one line of at most MAX_REFUSAL characters. The
    original error is not its cause, because logs show causes, with all text that the file has put into them."""
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
    """Return the prefix of the transformer's keys by ComfyUI's rules, or an empty string if there is none."""
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


def file_state(path: Path) -> str:
    """Return a digest of the file's name, size and times of change, or of the fact that it is missing.

    Ranks read a file after the client has opened it, and streamed blocks again at each use if the host has no room for them.
    The time of the inode's change (on Windows, of the file's creation) distinguishes files of the same size and the same
    modification time, which copying with times or unpacking can produce: no program can set it. Inode numbers are not used,
    because some network drives give a file another number at each opening.
    """
    try:
        status = path.stat()
    except OSError:
        state = "none"
    else:
        state = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return hashlib.blake2b(f"{path.name} {state}".encode(errors="surrogateescape"), digest_size=16).hexdigest()


def contents_of(path: Path) -> Contents:
    """Read the file's header and return its contents. Raises ValueError if the file is missing or of another kind, or if
    ComfyUI does not read its way of packing weights."""
    state, name = file_state(path), short(path.name)
    if not path.is_file():  # reading a pipe could block for ever
        raise ValueError(f"model_name: {name} does not exist at {short(path.parent, 300)}.")
    if path.suffix.lower() not in SAFETENSORS + GGUF:
        raise ValueError(
            f"model_name: {name} is not a .safetensors, .sft or .gguf file. Pickled checkpoints are never opened."
        )
    header, file = read_header(path), MappedFile(path)
    prefix = prefix_of(header.entries)
    entries = {key.removeprefix(prefix): entry for key, entry in header.entries.items() if key.startswith(prefix)}
    sampling = {key: file.tensor(header.entries[key]) for key in SAMPLING if key in header.entries}
    if (bias := entries.get(PREDICTS_V)) is not None and math.prod(bias.shape) <= MAX_UNSEEN:
        sampling[PREDICTS_V] = file.tensor(bias)
    entries = {key: entry for key, entry in entries.items() if key not in SAMPLING}
    if prefix and MARKER in header.entries:  # ComfyUI looks for it before and after it takes the prefix away
        entries.setdefault(MARKER, header.entries[MARKER])
    for ending, maker in FOREIGN.items():
        if any(key.endswith(ending) for key in entries):
            raise ValueError(
                f"model_name: {name} is quantised by {maker}, which neither ComfyUI nor Parallel DiT reads. Use a "
                "bf16, fp8 or GGUF file of the same model, or the nodes that were made for this file."
            )
    wishes = {key.removesuffix(PREFERENCE): entries.pop(key) for key in list(entries) if key.endswith(PREFERENCE)}
    asked = {} if path.suffix.lower() in GGUF else file.objects(wishes)
    kernels = {layer: _asked_kernel(name, layer, wish) for layer, wish in asked.items()}
    of_layers = {layer.removeprefix(prefix): each for layer, each in header.stated(QUANTISATION, "layers").items()}
    entries = attach_quantisation(name, entries, of_layers, file)
    # A matrix without values could claim any size. Empty vectors are markers.
    for key, entry in entries.items():
        if 0 in entry.shape and len(entry.shape) > 1:
            shape = short(list(entry.shape))
            raise ValueError(f"model_name: {name} has {short(key)} of shape {shape}, which has no values.")
    try:
        stated = header.stated("config", "transformer")
    except ValueError:  # ComfyUI reads it for some models alone
        stated = None
    attention = {layer: kernel for layer, kernel in kernels.items() if kernel}
    return Contents(path, entries, stated, attention, state, sampling)


def _joined(name: str, key: str, pieces: list[tuple[Entry, Span]]) -> Entry:
    first = pieces[0][0]
    if len(pieces) == 1 and (not first.shape or pieces[0][1] == Span(0, first.shape[0])):
        return first
    kinds = {(piece.dtype, piece.shape[1:]) for piece, _ in pieces}
    if len(kinds) > 1 or any(piece.scales or piece.layer or piece.lacks_scale for piece, _ in pieces):
        raise ValueError(
            f"model_name: {name} has {short(first.key)} in a diffusers layout that cannot be converted to {short(key)}. "
            "Use the file in ComfyUI's layout."
        )
    shape = (sum(len(span) for _, span in pieces), *first.shape[1:])
    return replace(first, key=key, shape=shape, pieces=tuple(pieces))


def _asked_kernel(name: str, layer: str, wishes: Any) -> str:
    """Return the ranks' kernel that a layer's `wishes`, read from JSON, ask for; empty if all methods are unknown. Raises
    ValueError if they are neither an object nor a list of objects. `name`: the file's."""
    methods = [_method(name, layer, wish) for wish in (wishes if isinstance(wishes, list) else [wishes])]
    return next((KERNELS[method] for method in methods if method in KERNELS), "")


def _method(name: str, layer: str, wish: Any) -> str:
    if not isinstance(wish, dict):
        raise ValueError(
            f"model_name: {name} has an attention setting for {short(layer)} in an unknown form: {short(wish)}. The file is "
            "damaged. Use another copy."
        )
    method = wish.get("attention")
    return method if isinstance(method, str) else ""


def check_own_arguments(name: str, arguments: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError, which names the argument, if an argument would make the class larger than the tensors of the file
    `name`.

    `arguments`: those of the class in the file's header, which ComfyUI passes on unchecked. `shapes`: shapes of its tensors.
    """
    widest = max((size for shape in shapes for size in shape), default=0)
    for argument, value in arguments.items():
        most = max(widest, MAX_UNSEEN)
        if any(word in argument for word in COUNTED):
            most = len(shapes)
        elif "theta" in argument:
            most = MAX_SETTING
        if not _plausible(value, most):
            raise ValueError(
                f"model_name: {name} says in its header that its {short(argument)} is {short(value)}, which no model "
                "with such tensors has. The file is damaged or malicious. Download the model again."
            )


def _plausible(value: Any, most: int) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= MAX_LIST and all(_is_number(item, most) for item in items)
    if value is None or isinstance(value, bool):
        return True
    return len(value) <= MAX_TEXT if isinstance(value, str) else _is_number(value, most)


def _is_number(value: Any, most: int) -> bool:
    # Some settings are switches, with -1 for off.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and -1 <= value <= most
