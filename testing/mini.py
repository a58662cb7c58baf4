"""A tiny model of the bundled model's class (quickstart/mini_flux.py), for tests that any model will do for: ranks run it by
its class, as they run ComfyUI's, and the class's own forward in this process is the reference.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from parallel_backend.acceptance.tiny_model import TINY, Call
from parallel_backend.acceptance.tiny_model import relative as relative
from parallel_backend.acceptance.tiny_model import save as save
from parallel_backend.checkpoints.checkpoint import Checkpoint, open_own_class, with_class
from parallel_backend.checkpoints.single_file import contents_of
from parallel_backend.client import proven_class
from parallel_backend.client.proven_class import call_of
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import from_tensors, structure_of, to_tensors
from parallel_backend.own_class.calls.tried_calls import Call as TriedCall
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.short_model import widened
from parallel_backend.planning.trials import Trials
from parallel_backend.quickstart.mini_flux import PATCH
from parallel_backend.quickstart.model import mini_flux
from testing.files import write_header

CONFIG: dict[str, Any] = json.loads(TINY.arguments)
"""The class's arguments: 8 heads of 16, 3 blocks of two streams and 5 of one."""
IN_COMFYUI = CONFIG | {
    "context_width": 64,
    "pooled_width": 32,
    "width": 256,
    "axes": (16, 56, 56),
    "double_blocks": 2,
    "single_blocks": 3,
    "guidance": False,
}
"""Of a width that ComfyUI takes for its Flux: it knows positions for heads of 128 alone."""
FLUX_DEV: dict[str, Any] = {
    "context_width": 4096,
    "pooled_width": 768,
    "width": 3072,
    "axes": (16, 56, 56),
    "double_blocks": 19,
    "single_blocks": 38,
    "guidance": True,
}
"""The arguments at FLUX.1 dev's sizes."""
AXES = {16: (4, 6, 6), 64: (8, 28, 28), 128: (16, 56, 56)}
"""Size of a head -> features of each axis, which a file does not tell."""
WIDE = 512


def random_model(config: Mapping[str, Any] = CONFIG, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The class on the CPU with random weights, large enough that every part of the model changes the output."""
    model, g = build(mini_flux(**config)), torch.Generator().manual_seed(seed)
    model.load_state_dict({name: drawn(name, each.shape, g) for name, each in model.state_dict().items()}, assign=True)
    return model.to(dtype)


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random values of a tensor."""
    values = torch.randn(shape, generator=generator)
    return values * 0.7 / shape[1] ** 0.5 if len(shape) > 1 else values * 0.1 + name.endswith("norm.scale")


def inputs(
    config: Mapping[str, Any] = CONFIG, batch: int = 2, height: int = 16, width: int = 12, text: int = 7, seed: int = 1
) -> Call:
    """A call of a model of this config, as ranks get it."""
    x = torch.randn(batch, 16, height, width, generator=torch.Generator().manual_seed(seed))
    return x, torch.full((batch,), 0.7), conditioning(config, batch, height, width, text, seed)


def conditioning(
    config: Mapping[str, Any] = CONFIG, batch: int = 2, height: int = 16, width: int = 12, text: int = 7, seed: int = 1
) -> dict[str, torch.Tensor]:
    """The tensors of a call with a latent of this size."""
    g = torch.Generator().manual_seed(~seed)
    named = {
        "context": torch.randn(batch, text, config["context_width"], generator=g),
        "pooled": torch.randn(batch, config["pooled_width"], generator=g),
    }
    if config["guidance"]:
        named["guidance"] = torch.full((batch,), 3.5)
    whole = (-(-side // PATCH) * PATCH for side in (height, width))  # the client fills it up in a circle
    return to_tensors(named, torch.ones(batch), (16, *whole))


def save_header(path: Path, config: Mapping[str, Any] = FLUX_DEV) -> Path:
    """A bf16 file of the class, of which only the header is written."""
    state = build(mini_flux(**config)).state_dict()
    return write_header(path, {name: tuple(value.shape) for name, value in state.items()})


def load(path: Path) -> torch.nn.Module:
    """The class with a file's weights in float32, in this process."""
    model = build(mini_flux(**config_of(path)))
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()}, assign=True)
    return model


@torch.inference_mode()
def reference(
    model: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The model's forward in this process."""
    return model(x, timestep, **from_tensors(tensors, structure_of(tensors)))


def config_of(path: Path) -> dict[str, Any]:
    """The class's arguments for a file."""
    shapes = {key: entry.shape for key, entry in contents_of(path).entries.items()}

    def blocks(name: str) -> int:
        return len({key.split(".")[1] for key in shapes if key.startswith(f"{name}.")})

    (head,) = next(shape for key, shape in shapes.items() if key.endswith("query_norm.scale"))
    return {
        "context_width": shapes["txt_in.weight"][1],
        "pooled_width": shapes["vector_in.in_layer.weight"][1],
        "width": shapes["img_in.weight"][0],
        "axes": AXES[head],
        "double_blocks": blocks("double_blocks"),
        "single_blocks": blocks("single_blocks"),
        "guidance": "guidance_in.in_layer.weight" in shapes,
    }


@functools.lru_cache(maxsize=32)
def _proven(arguments: str, tensor: int) -> OwnClass:
    config = json.loads(arguments)
    if config["width"] > WIDE:  # a trial at this width takes minutes
        heads = config["width"] // sum(config["axes"])
        factor = max(each for each in range(1, heads) if heads % (2 * tensor * each) == 0)
        return _widened(proven(config | {"width": config["width"] // factor}, tensor), arguments, factor)
    own, call = mini_flux(**config), example(config, 15, 11)  # to be filled up
    return proven_class.proven(own, call, Degrees(pipe=2, ulysses=2, tensor=tensor), "the mini model")


def _widened(own: OwnClass, arguments: str, factor: int) -> OwnClass:
    """The class of these arguments, by what is proven of one with so many times fewer heads."""
    blocks = [
        replace(block, cuts=tuple(replace(cut, sizes=tuple(factor * size for size in cut.sizes)) for cut in block.cuts))
        for block in widened(own.blocks, factor)
    ]
    return replace(own, arguments=arguments, blocks=tuple(blocks))


def proven(config: Mapping[str, Any] = CONFIG, tensor: int = 1) -> OwnClass:
    """The class, with what a trial shows of it for so many tensor ranks. ValueError if they cannot share its layers."""
    return _proven(json.dumps(dict(config)), tensor)


def trials(config: Mapping[str, Any] = CONFIG, degrees: Sequence[int] = (1, 2)) -> Trials:
    """What trials show of the class, by tensor degree."""
    proofs = {}
    for tensor in degrees:
        own = proven(config, tensor)
        proofs[tensor] = Proof(own.blocks, "", "", "", latent=own.latent, bands="", tensor="")
    return Trials(mini_flux(**config), proofs)


def opened(path: Path, tensor: int = 1, height: int = 16, width: int = 12, text: int = 7) -> Checkpoint:
    """The file's checkpoint by the class, proven for so many tensor ranks, with an example of this size for plans."""
    config = config_of(path)
    return with_call(open_own_class(path, proven(config, tensor)), config, height, width, text)


def with_call(
    checkpoint: Checkpoint, config: Mapping[str, Any] = CONFIG, height: int = 16, width: int = 12, text: int = 7
) -> Checkpoint:
    """An opened file of this config, with an example of this size for plans."""
    return replace(checkpoint, built=replace(checkpoint.built, call=example(config, height, width, text)))


def setup(path: Path, dtype: str, devices: tuple[str, ...], degrees: Degrees, *others: Any, **named: Any) -> Setup:
    """What ranks load of the file. Arguments as those of Setup."""
    return Setup(path, dtype, devices, degrees, *others, own_class=proven(config_of(path), degrees.tensor), **named)


def for_tensor(checkpoint: Checkpoint, tensor: int) -> Checkpoint:
    """An opened checkpoint, proven for so many tensor ranks. One of another class stays as it is."""
    own = checkpoint.built.own
    return with_class(checkpoint, _proven(own.arguments, tensor)) if own.name == mini_flux().name else checkpoint


def example(config: Mapping[str, Any] = CONFIG, height: int = 16, width: int = 12, text: int = 7) -> TriedCall:
    """A call of this config as a trial gets it."""
    x, _, tensors = inputs(config, height=height, width=width, text=text)
    return call_of(x, from_tensors(tensors, structure_of(tensors)))
