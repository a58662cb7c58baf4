"""Guidance of ComfyUI's nodes in bands of a latent. Run by serve.py.

First the table nodes/sampling/known_local.py, on a model that is a function of each pixel: all that can then differ between
bands and the whole latent is the guidance. Then the bundled model on ranks.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from boot import BUNDLED, Results, Told, comfy, difference, ksampler, node, nodes, parallel, torch
from guidance_nodes import PIXEL_WISE, WHOLE, guider_of, times

HEIGHT, BANDS = 12, 3
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
        patching, shape = base.diffusion_model.checkpoint.built.patching, tuple(self.noise.shape)
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


def on_ranks(put: Callable, sampler: str) -> dict:
    """The bundled model with a node, in bands, against the same in one call a step."""
    latent, texts = torch.zeros(1, 16, 16, 16), [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    model = put(plain := parallel(BUNDLED))
    sample = partial(ksampler, prompts=texts, latent=latent, sampler=sampler, steps=3)
    exact, without = sample(model), sample(plain)
    told = Told()
    banded = node("ApplyPipeFusion", model, 3, 1, True)
    first, second = (sample(banded) for _ in range(2))
    warm = sample(node("ApplyPipeFusion", model, 3, 1000, True))
    return {
        "warnings": list(told.texts),  # later cases say more
        "moved": difference(exact, without),
        "warm": difference(exact, warm),
        "repeat": difference(first, second),
        "stale": difference(exact, first),
    }


ON_RANKS = {
    "APG under a sampler that reads the unconditional prediction": (WHOLE["APG"], "euler_cfg_pp"),
    "Perp-Neg, which calls the model itself": (WHOLE["Perp-Neg"], "euler"),
    "unknown": (Centred().patch, "euler"),
}


def main(results: Results) -> None:
    for name, put in {**PIXEL_WISE, **WHOLE}.items():
        results.case(name, partial(in_parts, put, batch=2 if "Video" in name else 1))
    results.case("PerpNegGuider", partial(in_parts, lambda model: model, "PerpNegGuider"))
    nodes.NODE_CLASS_MAPPINGS["Centred"] = Centred
    for name, (put, sampler) in ON_RANKS.items():
        results.case(f"{name}, on ranks", partial(on_ranks, put, sampler))
