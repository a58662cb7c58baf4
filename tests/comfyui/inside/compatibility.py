"""Prompts that differ in a node between loader and sampler, by ComfyUI's own loader and by ours. Run by serve.py."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy
from boot import Results, other_attention, torch
from templates import differences, install_loaders, load_native, prepared, run, with_ours

import nodes


def seeded(prompt: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return run(prompt)


def eager(model: Any = None, **_named: Any) -> Any:
    """In place of torch.compile: compiled or not, the native model gives the same."""
    return model if model is not None else lambda function: function


def attempt(measure: Callable[[], float]) -> float | dict[str, str]:
    try:
        return measure()
    except Exception as error:
        return {"error": str(error)}


def main(results: Results, prompts: dict[str, Any], files: dict[str, str], loras: dict[str, str], modes: list[str]) -> None:
    """`prompts`: by node. `files`, `loras`: see templates.py."""
    asyncio.run(nodes.init_builtin_extra_nodes())
    with prepared(files, loras) as (case, vae):

        def natively(prompt: dict[str, Any], change: Callable[[Any], Any] = lambda model: model) -> list[torch.Tensor]:
            install_loaders(lambda name: change(load_native(name)), files, case, vae)
            with patch.object(torch, "compile", eager):
                return seeded(prompt)

        def compare(prompt: dict[str, Any]) -> dict[str, Any]:
            expected = natively(prompt)
            assert all(each.isfinite().all() for each in expected), "the native result is not finite"
            found = {
                mode: attempt(lambda mode=mode: max(differences(expected, seeded(with_ours(prompt, files, mode)))))
                for mode in modes
            }
            return {"ours": found, "itself": max(differences(expected, natively(prompt, other_attention)))}

        for name, prompt in prompts.items():
            results.case(name, partial(compare, prompt))
