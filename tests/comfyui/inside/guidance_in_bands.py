"""Guidance of ComfyUI's nodes, and of other packs', in bands of a latent. Run by serve.py.

First the table nodes/sampling/known_local.py, on a model that is a function of each pixel: all that can then differ between
bands and the whole latent is the guidance. Then the bundled model on ranks.
"""

import asyncio
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from boot import BUNDLED, Results, comfy, difference, ksampler, load_pack, node, nodes, parallel, torch
from samplers import Warnings
from server import PromptServer

HEIGHT, BANDS, STEPS = 12, 3, 5
PACKS = (
    *("Skimmed_CFG", "sd-dynamic-thresholding", "ComfyUI_essentials", "ComfyUI-KJNodes", "ComfyUI-Inspire-Pack"),
    "ComfyUI-bleh",
)
"""Folders that the packs' repositories are cloned to."""


def core(module: str, name: str, *arguments) -> Callable:
    """Puts a node of ComfyUI's own on a MODEL, in front of `arguments`."""

    def put(*model):
        kind = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        made = (kind.execute if hasattr(kind, "execute") else getattr(kind(), kind.FUNCTION))(*model, *arguments)
        return getattr(made, "args", made)[0]

    return put


def of_pack(name: str, *arguments) -> Callable:
    """Puts a pack's node on a MODEL."""

    def put(model):
        kind = nodes.NODE_CLASS_MAPPINGS[name]
        return getattr(kind(), kind.FUNCTION)(model, *arguments)[0]

    return put


def filtered(operation: str, *arguments) -> Callable:
    """Puts Latent Apply Operation CFG on a MODEL."""
    importlib.import_module("comfy_extras.nodes_post_processing")  # nodes_latent imports it in a circle
    operation = core("nodes_latent", operation, *arguments)
    return lambda model: core("nodes_latent", "LatentApplyOperationCFG", operation())(model)


def regional(model):
    """Inspire's Regional CFG with a mask whose rows differ."""
    return of_pack("RegionalCFG //Inspire", torch.linspace(0, 1, 64 * 64).reshape(1, 64, 64))(model)


def perp_neg(model):
    return core("nodes_perpneg", "PerpNeg", node("QuickstartPrompt", "7"), 0.8)(model)


class AudioVAE:
    """As much of one as LTXV Reference Audio needs."""

    audio_sample_rate = 8

    def encode(self, waveform: torch.Tensor) -> torch.Tensor:
        return waveform.new_zeros(1, 8, 4, 16)


AUDIO = {"waveform": torch.zeros(1, 2, 8), "sample_rate": 8}
PIXEL_WISE = {
    "CFGNorm": core("nodes_cfg", "CFGNorm", 0.8),
    "CFGNorm before": core("nodes_cfg", "CFGNorm", 0.8, True),
    "CFG Override": core("nodes_custom_sampler", "CFGOverride", 1.5, 0.0, 0.6),
    "Epsilon Scaling": core("nodes_eps", "EpsilonScaling", 1.05),
    "LTXV Modality Guidance": core("nodes_lt", "LTXVModalityGuidance", 3.0, 0.0, 0.6),
    "LTXV Reference Audio": core("nodes_lt", "LTXVReferenceAudio", [], [], AUDIO, AudioVAE(), 2.0, 0.2, 1.0),
    "LTXV STG": core("nodes_lt", "LTXVSpatioTemporalGuidance", 1.5, "1", 0.2, 1.0),
    "Temporal Score Rescaling": core("nodes_eps", "TemporalScoreRescaling", 0.9, 0.8),
    "Perturbed Attention": core("nodes_pag", "PerturbedAttentionGuidance", 2.0),
    "Skip Layers": core("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 0.7, "", "2"),
    "Skip Layers simple": core("nodes_slg", "SkipLayerGuidanceDiTSimple", 0.2, 0.7, "", "2"),
    "Video Linear CFG": core("nodes_video_model", "VideoLinearCFGGuidance", 1.0),
    "Video Triangle CFG": core("nodes_video_model", "VideoTriangleCFGGuidance", 1.0),
}
WHOLE = {
    "APG": core("nodes_apg", "APG", 0.5, 4.0, -0.5),
    "CFG-Zero*": core("nodes_cfg", "CFGZeroStar"),
    "FreSca": core("nodes_fresca", "FreSca", 0.9, 1.4, 3),
    "Latent Sharpen": filtered("LatentOperationSharpen", 2, 1.0, 0.3),
    "Latent Tonemap": filtered("LatentOperationTonemapReinhard", 0.7),
    "Mahiro": core("nodes_mahiro", "Mahiro"),
    "Perp-Neg": perp_neg,
    "RenormCFG": core("nodes_lumina2", "RenormCFG", 100.0, 0.9),
    "RescaleCFG": core("nodes_model_advanced", "RescaleCFG", 0.7),
    "Skip Layers rescaled": core("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "", "2", 0.7),
    "TCFG": core("nodes_tcfg", "TCFG"),
}
PACKS_PIXEL_WISE = {
    "Skimmed CFG": of_pack("Skimmed CFG", 5.0, False, False),
    "Skimmed CFG replace": of_pack("Skimmed CFG - replace"),
    "Skimmed CFG linear": of_pack("Skimmed CFG - linear interpolation", 4.0),
    "Skimmed CFG dual": of_pack("Skimmed CFG - linear interpolation dual scales", 4.0, 2.0),
    "Skimmed CFG flip": of_pack("Skimmed CFG - Timed flip", 0.3, False),
    "Guidance Timestepping": of_pack("GuidanceTimestepping+", 2.0, 0.2, 0.8),
}
PACKS_WHOLE = {
    "Difference CFG": of_pack("Skimmed CFG - Difference CFG", 2.0, "linear_distance", 0.9),
    "Difference CFG sum": of_pack("Skimmed CFG - Difference CFG", 2.0, "absolute_sum", 0.9),
    "Dynamic Thresholding": of_pack("DynamicThresholdingSimple", 2.0, 0.95),
    "Dynamic Thresholding full": of_pack(
        "DynamicThresholdingFull",
        *(2.0, 0.95, "Half Cosine Down", 1.0, "Half Cosine Up", 1.0, 1.0, "enable", "MEAN", "STD", 0.9),
    ),
    "CFG-Zero* (KJ)": of_pack("CFGZeroStarAndInit", True, 0),
    "Regional CFG": regional,
    "Contrastive CFG": lambda model: nodes.NODE_CLASS_MAPPINGS["BlehContrastiveOrthoCFG"].go(
        model=model, start_dim=1, end_dim=-1
    )[0],
    "Contrastive CFG after": lambda model: nodes.NODE_CLASS_MAPPINGS["BlehContrastiveOrthoCFG"].go(
        model=model, patch_mode="post_cfg", start_dim=1, end_dim=-1
    )[0],
}


PACKS_GUIDERS = ("ScheduledCFGGuidance", "ScheduledCFGGuider", "ScheduledPerpNegCFGGuider")


def guider_of(model, name: str, steps: int = STEPS, texts: tuple[str, ...] = ("3 1 4 1", "", "7"), cfg: float = 3.0):
    """A guider of that name with its conditioning set: a prompt, the negative one, and what Perp-Neg calls the empty one."""
    texts = [node("QuickstartPrompt", text) for text in texts]
    if name == "PerpNegGuider":
        return core("nodes_perpneg", name, *texts, cfg, 0.8)(model)
    if name == "ScheduledCFGGuidance":  # KJNodes
        return nodes.NODE_CLASS_MAPPINGS[name]().get_guider(model, cfg, *texts[:2], 0.0, 0.5)[0]
    if name.startswith("Scheduled"):  # Inspire
        kind = nodes.NODE_CLASS_MAPPINGS[f"{name} //Inspire"]()
        given = (*texts, 0.8) if "PerpNeg" in name else texts[:2]
        return kind.get_guider(model, *given, times(steps), cfg + 1, cfg - 1, "linear")[0]
    made = comfy.samplers.CFGGuider(model)
    made.set_conds(*texts[:2])
    made.set_cfg(cfg)
    return made


def times(steps: int = STEPS) -> torch.Tensor:
    return torch.linspace(1, 0, steps + 1) * 0.95


PERTURBING = ("stg_self_attn_blocks", "a2v_cross_attn", "patches_replace")
"""Entries of transformer_options by which guidance nodes ask for a second, worse prediction."""


def pixel_wise(
    x: torch.Tensor,
    t: torch.Tensor,
    c_crossattn: torch.Tensor,
    transformer_options: dict,
    ref_audio: float = 0.0,
    **_named,
) -> torch.Tensor:
    """In place of BaseModel.apply_model: at a pixel it depends on this pixel and the conditioning alone."""
    text = torch.sin(c_crossattn.flatten(1) * torch.arange(c_crossattn[0].numel())).sum(1) + ref_audio
    text, t = (value.reshape(-1, *[1] * (x.ndim - 1)) for value in (text, t))
    worse = any(name in transformer_options for name in PERTURBING)
    return x * 0.6 + torch.sin(x.roll(1, 1) * 2 + text) * (0.3 + 0.2 * t) + 0.3 * worse * x.roll(2, 1)


def load_packs(folder: Path, names: tuple[str, ...] = PACKS) -> None:
    PromptServer(asyncio.new_event_loop())  # packs add routes to it
    for pack in names:
        load_pack(folder / pack)


class Toy:
    """A guider on a MODEL whose function is pixel_wise, and Euler's method, of a whole latent or in bands."""

    def __init__(self, put: Callable, guider: str, batch: int):
        self.model = put(parallel(BUNDLED))
        base = self.model.model
        base.current_patcher, base.apply_model = self.model, pixel_wise
        self.guider = guider_of(self.model, guider)
        conds, self.guider.model_options = self.guider.original_conds, self.model.model_options
        comfy.sampler_helpers.prepare_model_patcher(self.model, conds, self.model.model_options)
        self.noise = torch.randn(batch, 16, HEIGHT, 10, generator=torch.Generator().manual_seed(4))
        self.guider.inner_model = base
        conds = {name: [cond.copy() for cond in conds] for name, conds in self.guider.original_conds.items()}
        self.guider.conds = comfy.samplers.process_conds(base, self.noise, conds, self.noise.device)
        for cond in self.guider.conds["positive"]:
            cond["model_conds"]["ref_audio"] = comfy.conds.CONDConstant(0.4)
        patching, shape = base.diffusion_model.checkpoint.family.patching, tuple(self.noise.shape)
        self.cut = ours("band_cut").BandCut(patching, ours("banded_run").cut_rows(shape, BANDS, patching), (shape,))

    def options(self) -> dict:
        made = comfy.model_patcher.create_model_options_clone(self.model.model_options)
        made.setdefault("transformer_options", {})["sample_sigmas"] = times()
        return made

    def whole(self, x: torch.Tensor, times: torch.Tensor, guider=None, options=None) -> torch.Tensor:
        guider, options = guider or self.guider, options or self.options()
        for now, then in pairwise(times):
            x = x + (x - guider(x, now * torch.ones(len(x)), options)) / now * (then - now)
        return x

    def bands(self, x: torch.Tensor, times: torch.Tensor, exact_above: float | None) -> torch.Tensor:
        """`exact_above`: BandedGuidance's; None: each band has its guider to itself."""
        shared = None if exact_above is None else ours("band_guidance").BandedGuidance(self.cut, exact_above, True)
        parts: dict[int, torch.Tensor] = {}

        def work(index: int) -> None:
            with torch.inference_mode(), ours("band_guider").releasing_waiters([shared] if shared else [], index):
                guider, options = ours("band_guider").band_guider(self.guider, self.cut, index, {}), self.options()
                if shared is not None:
                    shared.give_to(guider, index, options)
                parts[index] = self.whole(self.cut.band(x, index), times, guider, options)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(BANDS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if shared is not None:
            shared.keep()
        return self.cut.whole([parts[index] for index in range(BANDS)])


def ours(name: str):
    """A module of the pack."""
    if name in ("band_cut", "banded_run"):
        return importlib.import_module(f"parallel_backend.client.pipefusion.{name}")
    package = nodes.NODE_CLASS_MAPPINGS["ParallelDiTLoader"].__module__.rpartition(".")[0]
    return sys.modules[f"{package}.sampling.{name}"]


def unknown(toy: Toy) -> list[str]:
    """What of a guider and its MODEL a run would not be cut for."""
    local = ours("known_local")
    functions = [function for _, function in ours("eligibility").functions_of(toy.model.model_options)]
    names = [ours("eligibility").name_of(function) for function in functions if not local.is_known_guidance(function)]
    own = ours("eligibility").name_of(type(toy.guider))
    return names + [own] * (own not in local.PIXEL_WISE_GUIDERS | local.WHOLE_GUIDERS)


def in_parts(put: Callable, guider: str = "CFGGuider", batch: int = 1) -> dict[str, Any]:
    """Largest differences to a sampling of the whole latent.

    "moved": of one without the node and with ComfyUI's own guider. "cut": of bands that have a guider to themselves.
    "exact", "stale": of bands with BandedGuidance, all steps exact or the first one. "continued": of exact bands for half
    of the steps, and the whole latent for the others. "unknown": names.
    """
    toy = partial(Toy, put, guider, batch)
    x, all_times = toy().noise, times()
    expected = toy().whole(x, all_times)
    both = toy()
    half = both.bands(x, all_times[:3], -1.0)
    results = {
        "moved": Toy(lambda model: model, "CFGGuider", batch).whole(x, all_times),
        "cut": toy().bands(x, all_times, None),
        "exact": toy().bands(x, all_times, -1.0),
        "stale": toy().bands(x, all_times, float(all_times[1]) * (1 + 1e-6)),
        "continued": both.whole(half, all_times[2:]),
    }
    return {name: difference(expected, result) for name, result in results.items()} | {"unknown": unknown(both)}


class Centred:
    """A node that nobody knows."""

    def patch(self, model):
        model = model.clone()
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] - args["denoised"].mean())
        return model


WITHOUT: dict[str, torch.Tensor] = {}
"""Sampler -> what it gives without a node."""


def on_ranks(put: Callable, sampler: str) -> dict:
    """The bundled model with a node, in bands, against the same in one call a step."""
    latent, texts = torch.zeros(1, 16, 16, 16), [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    model = put(plain := parallel(BUNDLED))
    sample = partial(ksampler, prompts=texts, latent=latent, sampler=sampler, steps=3)
    exact = sample(model)
    if sampler not in WITHOUT:
        WITHOUT[sampler] = sample(plain)
    logging.getLogger().addHandler(told := Warnings())
    banded = node("ApplyPipeFusion", model, 3, 1, True)
    first, second = (sample(banded) for _ in range(2))
    warm = sample(node("ApplyPipeFusion", model, 3, 1000, True))
    logging.getLogger().removeHandler(told)
    return {
        "warnings": told.texts,
        "moved": difference(exact, WITHOUT[sampler]),
        "warm": difference(exact, warm),
        "repeat": difference(first, second),
        "stale": difference(exact, first),
    }


ON_RANKS = {
    "CFG Override": (PIXEL_WISE["CFG Override"], "euler"),
    "APG under a sampler that reads the unconditional prediction": (WHOLE["APG"], "euler_cfg_pp"),
    "APG under a sampler of two calls a step": (WHOLE["APG"], "heun"),
    "Perp-Neg, which calls the model itself": (WHOLE["Perp-Neg"], "euler"),
    "Skip Layers, with calls of its own": (PIXEL_WISE["Skip Layers"], "euler"),
    "Skip Layers rescaled, with calls of its own": (WHOLE["Skip Layers rescaled"], "euler"),
    "unknown": (Centred().patch, "euler"),
    "unknown operation": (core("nodes_latent", "LatentApplyOperationCFG", lambda latent, **_named: 0.9 * latent), "euler"),
}


def main(results: Results, packs: str | None) -> None:
    """`packs`: a folder of packs, whose nodes are tried then in place of ComfyUI's."""
    tables, guiders = (PIXEL_WISE, WHOLE), ("PerpNegGuider",)
    if packs is not None:
        load_packs(Path(packs))
        tables, guiders = (PACKS_PIXEL_WISE, PACKS_WHOLE), PACKS_GUIDERS
    for put_by_name in tables:
        for name, put in put_by_name.items():
            results.case(name, partial(in_parts, put, batch=2 if "Video" in name else 1))
    for name in guiders:
        results.case(name, partial(in_parts, lambda model: model, name))
    nodes.NODE_CLASS_MAPPINGS["Centred"] = Centred
    for name, (put, sampler) in ON_RANKS.items() if packs is None else ():
        results.case(f"{name}, on ranks", partial(on_ranks, put, sampler))
