"""Layouts of files as they are published, by names and shapes: what ComfyUI does with each, and what Parallel DiT does.

A row takes a file of Flux in ComfyUI's layout, and changes its names. To add a row, append a Layout to LAYOUTS:
tests/checkpoints/test_published_layouts.py opens it, and tests/comfyui/test_published_layouts.py loads it in ComfyUI too,
and compares.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.rivals.diffusers_flux import renamed
from testing import mini
from testing.gguf_files import write_gguf

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]
E4M3 = torch.float8_e4m3fn
CONFIG = mini.IN_COMFYUI | {"guidance": True}
"""The mini class's arguments. It has the names of Flux's tensors."""


@dataclass(frozen=True)
class Layout:
    """A published layout of Flux."""

    name: str
    change: Change = lambda tensors: tensors
    """The tensors in ComfyUI's layout -> those of the file."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Fields of the header."""
    ending: str = ".safetensors"
    """With .gguf all weights are in F32: what a block packs is another test's."""
    unused: tuple[str, ...] = ()
    """Tensors that are left out and named on the node: of those that ComfyUI's log calls unexpected."""
    refused: str = ""
    """Words of the refusal, as a regular expression. Empty: the file is loaded."""
    native: bool = True
    """ComfyUI loads the file, and misses no weight."""
    by_comfyui: bool = False
    """ComfyUI's class or conversion decides: without a ComfyUI it is not known."""

    def save(self, folder: Path) -> Path:
        """The file, of a small model for ComfyUI, with random weights."""
        path = folder / "flux.whole"
        if not path.exists():
            mini.save(mini.random_model(CONFIG), path)
        tensors, path, texts = self.change(load_file(path)), folder / f"{self.name}{self.ending}", dict(self.texts)
        if self.ending == ".gguf":
            values = {key: (value.float().numpy(), "F32") for key, value in tensors.items() if value.numel()}
            return write_gguf(path, values, {key: value.shape for key, (value, _) in values.items()}, texts)
        save_file({key: value.contiguous() for key, value in tensors.items()}, path, texts)
        return path


def under(prefix: str) -> Change:
    return lambda tensors: {prefix + key: value for key, value in tensors.items()}


def with_more(*keys: str, shape: tuple[int, ...] = (2,)) -> Change:
    """With further tensors of this shape."""
    return lambda tensors: tensors | {key: torch.zeros(shape) for key in keys}


def one_after_the_other(*changes: Change) -> Change:
    def change(tensors: Tensors) -> Tensors:
        for each in changes:
            tensors = each(tensors)
        return tensors

    return change


def diffusers(tensors: Tensors) -> Tensors:
    """Flux's under diffusers' names."""
    return {name: each for key, value in tensors.items() for name, each in renamed(key, value, CONFIG["width"]).items()}


def _matrices(tensors: Tensors) -> list[str]:
    return [key for key, value in tensors.items() if value.ndim == 2 and key.endswith(".weight") and "blocks" in key]


def fp8(tensors: Tensors) -> Tensors:
    """Plain fp8."""
    return tensors | {key: tensors[key].to(E4M3) for key in _matrices(tensors)}


def scaled_fp8(scale: str, marks: Callable[[list[str]], Tensors]) -> Change:
    """fp8 with a scale for each matrix, `marks`: tensors for these layers that say so."""

    def change(tensors: Tensors) -> Tensors:
        stored, layers = dict(tensors), []
        for key in _matrices(tensors):
            factor = tensors[key].abs().max() / torch.finfo(E4M3).max
            layers.append(key.removesuffix(".weight"))
            stored |= {key: (tensors[key] / factor).to(E4M3), f"{layers[-1]}.{scale}": factor}
        return stored | marks(layers)

    return change


def _said(layers: list[str]) -> Tensors:
    said = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    return {f"{layer}.comfy_quant": said.clone() for layer in layers}


def nunchaku(tensors: Tensors) -> Tensors:
    key = _matrices(tensors)[0].removesuffix("weight")
    packed = {f"{key}qweight": torch.zeros(2, 2, dtype=torch.int8), f"{key}wscales": torch.zeros(2, 2)}
    return {name: value for name, value in tensors.items() if name != f"{key}weight"} | packed


def nf4(tensors: Tensors) -> Tensors:
    key = _matrices(tensors)[0]
    packed = torch.zeros(math.ceil(tensors[key].numel() / 2), 1, dtype=torch.uint8)
    state = {f"{key}.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8), f"{key}.absmax": torch.zeros(2)}
    return tensors | {key: packed} | state


def instead(*keys: str) -> Change:
    """Tensors of another kind of file."""
    return lambda _tensors: {key: torch.zeros(2, 2) for key in keys}


WHOLE = "model.diffusion_model."
ALL_IN_ONE = one_after_the_other(
    under(WHOLE),
    with_more("first_stage_model.decoder.conv_in.weight", "text_encoders.t5xxl.shared.weight", "model_ema.num_updates"),
)
TRAINING = ("model_ema.decay", "alphas_cumprod", "model_sampling.sigmas", "optimizer.state.0.exp_avg", "vae.decoder.a")

LAYOUTS = (
    # prefixes
    *(Layout(f"flux {prefix}", under(prefix)) for prefix in (WHOLE, "model.model.", "net.", "model.")),
    Layout("flux unknown prefix", under("dit."), refused="not a diffusion transformer .*dit", by_comfyui=True, native=False),
    Layout("auraflow-like model. leftover", with_more("model.a"), refused="not a diffusion", by_comfyui=True, native=False),
    # several parts in one file
    Layout("flux all in one", ALL_IN_ONE),
    Layout("flux with a VAE beside it", with_more(*TRAINING), unused=TRAINING),
    # tensors that no class has
    Layout("flux position_ids", with_more("position_ids"), unused=("position_ids",)),
    # header fields
    Layout("flux config no JSON", texts={"config": "made by hand"}),
    # GGUF and endings
    Layout("flux gguf", ending=".gguf"),
    Layout("flux sft", ending=".sft"),
    # diffusers' names
    Layout("flux diffusers", diffusers, by_comfyui=True),
    # quantised
    Layout("flux fp8", fp8),
    Layout("flux scaled_fp8", scaled_fp8("scale_weight", lambda _layers: {"scaled_fp8": torch.zeros(2, dtype=E4M3)})),
    Layout("flux comfy_quant", scaled_fp8("weight_scale", _said)),
    Layout("flux nunchaku", nunchaku, refused=r"quantised by Nunchaku", native=False),
    Layout("flux nf4", nf4, refused=r"quantised by bitsandbytes", native=False),
    # other kinds of files
    Layout("lora", instead("a.lora_down.weight", "a.lora_up.weight"), refused="It is a LoRA", by_comfyui=True, native=False),
    Layout("VAE alone", instead("decoder.conv_in.weight"), refused="It is a VAE", by_comfyui=True, native=False),
)
