"""Writes files of small models, and their conditioning as small_cases.py reads it. Run by serve.py."""

import json
from typing import Any

from boot import BASE, Results, parts_of, torch
from safetensors.torch import save_file
from small_cases import detecting
from small_models import detected, latent, prompts, small_model, write


def described(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON, its tensors added to `tensors`: see small_cases.py."""
    if isinstance(value, torch.Tensor):
        tensors[name := f"part {len(tensors)}"] = value
        return {"tensor": name}
    if isinstance(value, list):
        return [described(item, tensors) for item in value]
    return {key: described(item, tensors) for key, item in value.items()} if isinstance(value, dict) else value


def main(_results: Results, names: list[str]) -> None:
    for name in names:
        with detecting(detected(name)):
            write(name)
        plain, tensors = {}, dict(zip(("latent", "companion"), parts_of(latent(name)), strict=False))
        for sign, [(text, extras)] in zip(("positive", "negative"), prompts(name), strict=True):
            tensors[f"{sign}.text"] = text
            for key, value in extras.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{sign}.{key}"] = value
                elif isinstance(value, list) and isinstance(value[0], torch.Tensor):
                    tensors |= {f"{sign}.{key}/{index}": item for index, item in enumerate(value)}
                elif hasattr(value, "__dict__"):
                    tensors |= {f"{sign}.{key}.{attribute}": item for attribute, item in vars(value).items()}
                else:
                    plain[key] = described(value, tensors)
        told = {"cfg": 3.0, "scheduler": "simple", "extras": plain, "detected": detected(name)}
        settings = json.dumps(told | {"boolean_masks": small_model(name).get("boolean_masks", False)})
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, BASE / f"{name}.inputs.safetensors", {"settings": settings})
