"""Small files of ComfyUI's classes, with random values, and the conditioning of a call. Inside ComfyUI's process.

small_models.json has by name: `kind`, a class of ComfyUI's supported_models; `arguments` of its transformer, as its
detection gives them for the file; `detected`, names of those that it takes for granted and that are others here, "all" of
them, or what small_cases.detecting is given; `text`, [tokens, width]; `latent`, [C, (T,) H, W]; `more`, entries of the
conditioning, as Published has them, {"uniform": shape}, a mask of {"ones": shape} with so many {"zeros"} at its end, or
{"of": shape} with {"frames"} values, {"whole": shape} numbers {"below"} one, so many {"ids"} or {"weights"} of tokens, or
other entries' values by name;
`companion`, the latent of its sound; `stated`, true if its file's header says the arguments; `equalised`, the beginning of
names of layers that divide their weights by the root of their inputs themselves; `own`, the end of names of tables that have
the class's own values; `negative`, as `text`, of the negative prompt; `boolean_masks`, true if it masks attention by
booleans, which only ComfyUI's kernel of PyTorch's attention reads so. `like` names another model, of which it has all that
it does not say.
"""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.supported_models
from boot import BASE, torch
from comfy.nested_tensor import NestedTensor
from safetensors.torch import save_file

_ROWS = json.loads((Path(__file__).parent / "small_models.json").read_text("utf-8"))


def small_model(name: str) -> dict[str, Any]:
    """What small_models.json has of it."""
    row = _ROWS[name]
    return small_model(row["like"]) | row if "like" in row else row


def detected(name: str) -> dict[str, Any]:
    """For small_cases.detecting."""
    row = small_model(name)
    told = row.get("detected", {})
    if isinstance(told, dict):
        return told
    return {entry: value for entry, value in row["arguments"].items() if told == "all" or entry in told}


def write(name: str) -> Path:
    """A file of random values, with gates and norms that are not 0."""
    row = small_model(name)
    arguments = dict(row["arguments"])
    config = getattr(comfy.supported_models, row["kind"])(arguments)
    config.set_inference_dtype(torch.float32, None)
    g, state = torch.Generator().manual_seed(5), {}
    for key, value in config.get_model({}, "").diffusion_model.state_dict().items():
        if "own" in row and key.endswith(row["own"]):
            state[key] = value
            continue
        is_divided = "equalised" in row and key.startswith(row["equalised"])
        std = 1.0 if is_divided else 1 / math.sqrt(value[0].numel()) if value.ndim > 1 else 0.1
        state[key] = std * torch.randn(value.shape, generator=g) + (1.0 if value.ndim == 1 and "weight" in key else 0.0)
    path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
    stated = {"config": json.dumps({"transformer": arguments})} if row.get("stated") else None
    save_file(state, path, stated)
    return path


def prompts(name: str) -> list:
    """Positive and negative. Pictures and masks are the same for both."""
    row = small_model(name)
    texts = row["text"], row.get("negative", row["text"])
    seeds = [(torch.Generator().manual_seed(seed), text) for seed, text in enumerate(texts)]
    return [[[torch.randn(1, *text, generator=g), entries(row.get("more", {}), g)]] for g, text in seeds]


def latent(name: str) -> torch.Tensor | NestedTensor:
    parts = [torch.zeros(1, *row) for row in map(small_model(name).get, ("latent", "companion")) if row]
    return NestedTensor(parts) if len(parts) > 1 else parts[0]


def entries(more: Mapping[str, Any], g: torch.Generator) -> dict[str, Any]:
    """Entries of a conditioning, see above."""
    found: dict[str, Any] = {}
    for place, shape in more.items():
        entry, _, attribute = place.partition(".")
        if "pooled" not in place and "conditioning" not in place:
            g = torch.Generator().manual_seed(zlib.crc32(place.encode()))
        value = _value(shape, g)
        found[entry] = SimpleNamespace(**{attribute: value}) if attribute else value
    return found


def _value(shape: Any, g: torch.Generator) -> Any:
    if isinstance(shape, dict):
        if "is" in shape:
            return shape["is"]
        if "ones" in shape:
            mask = torch.ones(1, *shape["ones"], dtype=torch.long)
            mask[:, shape["ones"][0] - shape.get("zeros", 0) :] = 0
            return mask
        if "whole" in shape:
            return torch.randint(0, shape["below"], (1, *shape["whole"]), generator=g)
        if "frames" in shape:
            return torch.tensor(shape["frames"]).view(1, 1, -1, 1, 1).expand(1, *shape["of"])
        if "ids" in shape:
            return torch.randint(0, 32000, (shape["ids"],), generator=g)
        if "weights" in shape:
            return 1 + torch.rand(shape["weights"], generator=g) / 2
        if "uniform" in shape:
            return torch.rand(1, *shape["uniform"], generator=g)
        return {entry: _value(each, g) for entry, each in shape.items()}
    if shape and isinstance(shape[0], list | dict):
        return [_value(each, g) for each in shape]
    return torch.randn(1, *shape, generator=g)
