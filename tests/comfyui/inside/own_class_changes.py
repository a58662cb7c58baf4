"""Nodes that change blocks of ComfyUI's own class on ranks, against ComfyUI's own MODEL. Run by serve.py."""

from functools import partial
from typing import Any

import model_optimization_nodes
from block_patches import ALL, SOME, extra, load_extras
from boot import BASE, Results, by_own_class, comfy, difference, ksampler, parallel, sharing_small_lists, torch
from families import detecting, read
from own_classes import MODES
from small_models import detected, latent, prompts, write

COMPILED = {"compiled stages": partial(parallel, compile=True)}
CHANGES = {
    "every step": partial(extra, "SkipLayerGuidanceDiT", double_layers="1", single_layers="0, 9", scale=3.0, **ALL),
    "simple": partial(extra, "SkipLayerGuidanceDiTSimple", double_layers="0", single_layers="1", **SOME),
    "NAG": partial(extra, "NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
}


def main(results: Results, wanted: dict[str, dict[str, list[str]]], of_families: list[str]) -> None:
    """`wanted`: model -> change -> modes. `of_families`: models that have their files and conditioning from families'
    cases; the others are of small_models.json."""
    load_extras("nodes_slg", "nodes_nag")
    for name, changes in wanted.items():
        of_family = name in of_families
        given: Any = read(name) if of_family else (*prompts(name), latent(name), {"detected": detected(name)})
        with detecting(given[-1]["detected"]), sharing_small_lists():
            if not of_family:
                write(name)
            of_model(results, name, given[:2], given[2], changes)


def of_model(results: Results, name: str, texts: Any, latent: Any, changes: dict[str, list[str]]) -> None:
    file = f"{name}.safetensors"
    native = comfy.sd.load_diffusion_model(
        str(BASE / "models" / "diffusion_models" / file), model_options={"dtype": torch.float32}
    )
    width = texts[0][0][0].shape[-1]
    second = torch.randn(1, 6, width, generator=torch.Generator().manual_seed(3))  # of another length than the prompts'
    changes_of = CHANGES | {
        f"WanVideoNAG {kind}": partial(model_optimization_nodes.nag, text=second, input_type=kind)
        for kind in ("default", "batch")
    }
    plain = ksampler(native, texts, latent, steps=2)
    expected: dict[str, torch.Tensor] = {}

    def compare(change: str, mode: str) -> dict:
        if change not in expected:
            expected[change] = ksampler(changes_of[change](native), texts, latent, steps=2)
        model = by_own_class((MODES | COMPILED)[mode], file)
        found = ksampler(changes_of[change](model), texts, latent, steps=2)
        wrappers = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
        largest = float(expected[change].abs().max())
        return {
            "share": difference(expected[change], found) / largest,
            "effect": difference(expected[change], plain) / largest,
            "whole because": [wrapper.last.reason for wrapper in wrappers],
        }

    for change, modes in changes.items():
        for mode in modes:
            results.case(f"{name}, {change}, {mode}", partial(compare, change, mode))
