"""Nodes that change a model's blocks: Parallel DiT Loader's MODEL against ComfyUI's own. Run by serve.py."""

import asyncio
from functools import partial
from typing import Any

import model_optimization_nodes
import torch
from boot import (
    CHECKOUT,
    Results,
    difference,
    ksampler,
    native_model,
    node,
    parallel,
    random_prompts,
    sharing_small_lists,
    whole_because,
)
from small_cases import small
from small_models import latent as latent_of
from small_models import prompts

import nodes


def extra(name: str, model: Any, **inputs: Any) -> Any:
    """The MODEL that one of ComfyUI's own nodes gives out."""
    return nodes.NODE_CLASS_MAPPINGS[name].execute(model, **inputs)[0]


def load_extras(*names: str) -> None:
    """As ComfyUI loads its comfy_extras."""
    for name in names:
        file = CHECKOUT / "comfy_extras" / f"{name}.py"
        if file.exists():
            assert asyncio.run(nodes.load_custom_node(str(file), module_parent="comfy_extras"))


def compare(change: Any, own: Any, model: Any, texts: list, latent: torch.Tensor) -> dict[str, Any]:
    """`change`: puts the node on a MODEL. `own`: the native one. `model`: on ranks."""
    expected, plain = (ksampler(each, texts, latent, steps=2) for each in (change(own), own))
    found = ksampler(change(model), texts, latent, steps=2)
    return {
        "difference": difference(expected, found),
        "effect": difference(expected, plain),
        "whole because": whole_because(model),
    }


def main(results: Results) -> None:
    of_wan(results, "wan-2.1-t2v")
    other, both, square = parallel("tiny.safetensors"), random_prompts(9, 9), torch.zeros(1, 16, 16, 16)
    results.case("refusal", lambda: ksampler(model_optimization_nodes.of_other_model(other), both, square, steps=2))


def of_wan(results: Results, name: str) -> None:
    texts, latent, file = prompts(name), latent_of(name), f"{name}.safetensors"
    width = texts[0][0][0].shape[-1]
    text = torch.randn(1, 6, width, generator=torch.Generator().manual_seed(3))  # of another length than the prompts'
    change = partial(model_optimization_nodes.nag, text=text, input_type="default")

    def in_front() -> dict[str, Any]:
        """The node on the native MODEL, which has been sampled with it, and Parallelize Model behind."""
        own = native_model(file)
        ksampler(change(own), texts, latent, steps=2)
        model = node("ParallelizeModel", change(own), 2, "ulysses")
        return compare(lambda each: each if each is model else change(each), own, model, texts, latent)

    with small(name), sharing_small_lists():
        results.case(
            "WanVideoNAG, pipefusion",
            lambda: compare(
                change, native_model(file), node("ApplyPipeFusion", parallel(file), 2, 1000, True), texts, latent
            ),
        )
        results.case("WanVideoNAG in front, parallelized", in_front)
