"""Kinds of files: quantised ones, GGUF, own classes. Each kind makes a Trial from random numbers."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.calls.tried_calls import Call, draw_weights
from parallel_backend.own_class.trials.trial import trial
from testing import mini, quantised
from tests.support.planted_comfyui import planted

from . import damage
from .tensors import NUMBERS, TEXTS, Stored, changed, reshaped, resized, stored, write
from .verdict import Trial

MADE = "model.safetensors"
QUANTISED = mini.IN_COMFYUI | {"double_blocks": 1, "single_blocks": 1, "context_width": 256, "pooled_width": 256}
"""The mini class, with rows of whole groups of every format."""
FAST = tuple(kind for kind in quantised.KINDS if kind not in quantised.SLOW)
LEAVES = (
    *("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "weight_s_rel", "weight_s_channel"),
    "weight_codebook",
)
SETTINGS = (
    *("format", "convrot", "convrot_groupsize", "group_size", "full_precision_matrix_mult", "linear_dtype", "params"),
    "nonsense",
)
TYPES = gguf.GGMLQuantizationType


def emptied(folder: Path) -> Path:
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    return folder


def name_of(rng: random.Random, ending: str) -> str:
    """Mostly a plain one."""
    if rng.random() < 0.9:
        return f"model{ending}"
    return (
        rng.choice(TEXTS).replace("/", "").replace("\0", "")[:150].encode("utf-8", "surrogatepass").decode(errors="ignore")
        + ending
    )


@cache
def quantised_state(kind: str) -> dict[str, torch.Tensor]:
    state = dict(mini.random_model(QUANTISED).state_dict())
    return state if kind == "plain" else quantised.quantise_blocks(state, kind)[0]


def packed(folder: Path) -> Callable[[random.Random], Trial]:
    """Files in ComfyUI's quantised formats: settings, scales and codebooks."""

    def make(rng: random.Random) -> Trial:
        state = dict(quantised_state(rng.choice(FAST)))
        layers = [key.removesuffix(".comfy_quant") for key in state if key.endswith(".comfy_quant")]
        layer = rng.choice(layers)
        how = rng.randrange(4)
        tensors = stored(state)
        if how < 2:
            said = json.loads(bytes(state[f"{layer}.comfy_quant"].tolist()))
            for _ in range(rng.choice((1, 1, 2))):
                setting = rng.choice(SETTINGS)
                if rng.random() < 0.2:
                    said.pop(setting, None)
                elif setting == "format" and rng.random() < 0.7:
                    said[setting] = rng.choice([format for format, _, _ in quantised.KINDS.values()])
                else:
                    said[setting] = rng.choice((*NUMBERS, *TEXTS[:4], 4, 16, 64, 1024))
            text = json.dumps(said).encode() if rng.random() < 0.9 else damage.text(rng, said)
            tensors[f"{layer}.comfy_quant"] = Stored("U8", (len(text),), text)
        elif how == 2:
            leaves = [key for key in tensors if key.startswith(f"{layer}.") and key.rpartition(".")[2] in LEAVES]
            leaf = rng.choice(leaves) if leaves else f"{layer}.weight_scale"
            tensors[leaf] = rng.choice((_spoiled_scale, resized, reshaped))(
                rng, tensors.get(leaf, Stored("F32", (1,), bytes(4)))
            )
            if rng.random() < 0.3:
                extra = f"{layer}.{rng.choice(LEAVES)}"
                tensors[extra] = Stored.of(torch.ones(rng.choice(((), (1,), (16,), (1, 16), (256,), (256, 1)))))
        else:
            tensors = changed(rng, tensors, layer)
        path = emptied(folder) / MADE
        write(path, tensors)
        return Trial(path, mini.proven(QUANTISED), ModelCall(*mini.inputs(QUANTISED)))

    return make


def _spoiled_scale(rng: random.Random, scale: Stored) -> Stored:
    return Stored(scale.dtype, scale.shape, rng.choice((b"\xff", b"\x7f", b"\0")) * len(scale.content))


def ggufs(folder: Path) -> Callable[[random.Random], Trial]:
    """GGUF files in blocks: shapes stated, types, damaged bytes."""

    def make(rng: random.Random) -> Trial:
        state = quantised_state("plain")
        path = emptied(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, arch="flux")
        kind, odd = rng.choice(("Q8_0", "Q4_0", "Q5_1", "BF16", "F16")), set(rng.sample(list(state), rng.choice((0, 1, 2))))
        for key, value in state.items():
            values = value.float()
            if key in odd and rng.random() < 0.5:
                shape = reshaped(rng, Stored.of(values)).shape
                values = values.reshape(shape)
            elif key in odd and rng.random() < 0.4:
                values = values.flatten()[: max(32, values.numel() // 2)]
            if key in odd and rng.random() < 0.7:
                stated = list(reshaped(rng, Stored.of(value.float())).shape)
                if rng.random() < 0.2:
                    stated[0] = rng.choice((0, -1, 2**31 - 1))
                writer.add_array(f"comfy.gguf.orig_shape.{key}", [int(size) for size in stated])
            blocks = values.ndim > 1 and values.shape[-1] % 32 == 0
            chosen = kind if blocks else "F32"
            if key in odd and values.shape[-1:] and values.shape[-1] % 32 == 0 and rng.random() < 0.3:
                chosen = rng.choice(("Q8_0", "Q4_0"))
            name = key + rng.choice(TEXTS[:4]) if key in odd and rng.random() < 0.1 else key
            writer.add_tensor(name, gguf.quants.quantize(values.numpy(), TYPES[chosen]), raw_dtype=TYPES[chosen])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if rng.random() < 0.25:
            content = path.read_bytes()
            head = content.find(b"img_in") + 2000
            path.write_bytes(damage.bytes_of(rng, content[:head]) + content[head:])
        return Trial(path, mini.proven(QUANTISED), ModelCall(*mini.inputs(QUANTISED)))

    return make


OWN = "Tokens", "TwoStreams", "Crossed"
"""Planted classes that ranks share out in every way."""


@cache
def proven(name: str) -> tuple[OwnClass, ModelCall, dict[str, torch.Tensor], torch.Tensor]:
    """A planted class with its proof, a call, weights, and what the call gives."""
    own, g = planted(name), torch.Generator().manual_seed(0)
    draw_weights(model := build(own), 7)
    named = {"context": torch.randn(2, 5, 16, generator=g)}
    given = Call(torch.randn(2, 4, 2, 4, 6, generator=g), torch.tensor([700.0, 300.0]), named)
    own = replace(own, blocks=trial(own, given, (900.0, 1.0)).blocks)
    with torch.inference_mode():
        whole = given.run(model)
    return own, ModelCall(given.x, given.timestep, to_tensors(named, given.timestep)), model.state_dict(), whole


def own_classes(folder: Path) -> Callable[[random.Random], Trial]:
    """Files of planted classes. To be used within planted_comfyui."""

    def make(rng: random.Random) -> Trial:
        own, call, state, whole = proven(rng.choice(OWN))
        sound, path = rng.random() < 0.03, emptied(folder) / name_of(rng, ".safetensors")
        tensors = stored(state)
        if rng.random() < 0.3:
            matrices = [key for key, value in state.items() if value.ndim == 2]
            for key in rng.sample(matrices, 2):
                tensors[key] = Stored.of(state[key].to(rng.choice((torch.bfloat16, torch.float8_e4m3fn))))
        write(path, tensors if sound else changed(rng, tensors))
        if not sound and rng.random() < 0.15:
            content = path.read_bytes()
            path.write_bytes(damage.bytes_of(rng, content[:2000]) + content[2000:])
        is_exact = sound and all(tensor.dtype == "F32" for tensor in tensors.values())
        return Trial(path, own, call, whole if is_exact else None)

    return make
