"""Nodes of ComfyUI that change a model's blocks: Parallel DiT Loader's MODEL against ComfyUI's own. Run by serve.py."""

import asyncio
from functools import partial
from typing import Any

import families
import model_optimization_nodes
from boot import BASE, CHECKOUT, Results, comfy, difference, ksampler, node, parallel, sequence, torch
from parity import FILE, SD3, prompts

import nodes

SQUARE = torch.zeros(1, 16, 16, 16)
ALL = {"start_percent": 0.0, "end_percent": 1.0}
SOME = {"start_percent": 0.3, "end_percent": 0.8}


def extra(name: str, model: Any, **inputs: Any) -> Any:
    """The MODEL that one of ComfyUI's own nodes gives out."""
    return nodes.NODE_CLASS_MAPPINGS[name].execute(model, **inputs)[0]


def load_extras(*names: str) -> None:
    """As ComfyUI loads its comfy_extras."""
    for name in names:
        file = CHECKOUT / "comfy_extras" / f"{name}.py"
        if file.exists():
            assert asyncio.run(nodes.load_custom_node(str(file), module_parent="comfy_extras"))


def main(results: Results, wan: str) -> None:
    load_extras("nodes_slg", "nodes_sd3", "nodes_pag", "nodes_nag", "nodes_hypertile")
    known = set(nodes.NODE_CLASS_MAPPINGS)
    guided = {
        "SLG": partial(extra, "SkipLayerGuidanceDiT", double_layers="1", single_layers="0, 2, 9", scale=3.0, **ALL),
        "SLG in some steps": partial(
            extra, "SkipLayerGuidanceDiT", double_layers="0", single_layers="", scale=2.0, rescaling_scale=0.5, **SOME
        ),
        "SLG simple": partial(extra, "SkipLayerGuidanceDiTSimple", double_layers="0", single_layers="1", **SOME),
        "SLG SD3": partial(extra, "SkipLayerGuidanceSD3", layers="1", scale=3.0, **ALL),
        "PAG": partial(extra, "PerturbedAttentionGuidance", scale=3.0),
        "NAG": partial(extra, "NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
        "HyperTile": partial(extra, "HyperTile", tile_size=64, swap_size=2, max_depth=0, scale_depth=False),
        "plain": lambda model: model,
    }
    lacking = {name: add.args[0] for name, add in guided.items() if name != "plain" and add.args[0] not in known}
    both, uneven = prompts(9, 9), prompts(9, 5)
    natives = {
        name: comfy.sd.load_diffusion_model(
            str(BASE / "models" / "diffusion_models" / name), model_options={"dtype": torch.float32}
        )
        for name in (FILE, SD3)
    }
    expected: dict[tuple, torch.Tensor] = {}

    def native(file: str, name: str, texts: list, latent: torch.Tensor, **settings: Any) -> torch.Tensor:
        key = file, name, texts[1][0][0].shape[1], len(latent), *settings.items()
        if key not in expected:
            expected[key] = ksampler(guided[name](natives[file]), texts, latent, **settings)
        return expected[key]

    def compare(make, file: str, name: str, texts: list = both, latent: torch.Tensor = SQUARE, **settings: Any) -> dict:
        settings = {"steps": 2} | settings
        wanted = native(file, name, texts, latent, **settings)
        model = make(file)
        found = ksampler(guided[name](model), texts, latent, **settings)
        wrappers = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
        return {
            "difference": difference(wanted, found),
            "effect": difference(wanted, native(file, "plain", texts, latent, **settings)),
            "whole because": [wrapper.last.reason for wrapper in wrappers],
        }

    modes = {
        "pipefusion": lambda file: node("ApplyPipeFusion", parallel(file), 2, 1000, True),
        "ulysses": lambda file: parallel(file, pipe=1, config=sequence(ulysses=2)),
        "split batch": lambda file: parallel(file, pipe=1, batch=2),
        "tensor": lambda file: parallel(file, pipe=1, tensor=2),
    }

    def case(mode: str, file: str, name: str, note: str = "", **settings: Any) -> None:
        measure = partial(compare, modes[mode], file, name, **settings)
        results.case(f"{name}{note}, {mode}", (lambda: {"lacks": lacking[name]}) if name in lacking else measure)

    for name in guided:
        if name not in ("plain", "SLG SD3", "HyperTile"):
            case("pipefusion", FILE, name)
    case("pipefusion", FILE, "NAG", " cfg 1", cfg=1.0)
    case("pipefusion", FILE, "NAG", " texts apart", texts=uneven)
    case("ulysses", FILE, "NAG", " batch 2", latent=torch.zeros(2, 16, 16, 16))
    case("split batch", FILE, "NAG", " batch 2", latent=torch.zeros(2, 16, 16, 16))
    case("tensor", FILE, "NAG")
    case("pipefusion", SD3, "SLG SD3")
    case("pipefusion", SD3, "NAG", " on SD3")
    case("pipefusion", SD3, "HyperTile", " on SD3")

    with families.detecting(families.read(wan)[-1]["detected"]):
        positive, negative, latent, _ = families.read(wan)
        natives[f"{wan}.safetensors"] = comfy.sd.load_diffusion_model(
            str(BASE / "models" / "diffusion_models" / f"{wan}.safetensors"), model_options={"dtype": torch.float32}
        )
        given = {"texts": [positive, negative], "latent": latent}
        text = torch.randn(1, 6, positive[0][0].shape[-1], generator=torch.Generator().manual_seed(3))
        guided["WanVideoNAG"] = partial(model_optimization_nodes.nag, text=text, input_type="default")

        def in_front() -> dict:
            """The node on the native MODEL, which has been sampled with it, and Parallelize Model behind."""
            file, name, settings = f"{wan}.safetensors", "WanVideoNAG", {"steps": 2}
            model = node("ParallelizeModel", guided[name](natives[file]), 2, "ulysses")
            wanted, plain = (native(file, each, *given.values(), **settings) for each in (name, "plain"))
            found = ksampler(model, given["texts"], latent, **settings)
            return {"difference": difference(wanted, found), "effect": difference(wanted, plain), "whole because": []}

        results.case("WanVideoNAG in front, parallelized", in_front)
    other = parallel(FILE)
    results.case("refusal", lambda: ksampler(model_optimization_nodes.of_other_model(other), both, SQUARE, steps=2))
