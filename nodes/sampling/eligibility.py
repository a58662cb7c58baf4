"""Decides whether a sampling can be cut into bands, and says why if not."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut

from ..model.call.concurrent_conds import evaluate_concurrently
from ..model.call.diffusion_model import RemoteDiffusionModel
from ..model.controls.fun_control import fun_controls
from ..model.patches.reach import OVERRIDE
from ..model.patches.sparse_attention import is_sparse
from ..model.run.run_shapes import Shapes, shapes_of_run
from ..ui.other_nodes import OURS, definition, name_of, named, nodes_of
from .known_local import PIXEL_WISE_GUIDERS, PIXEL_WISE_MASKS, WHOLE_GUIDERS, is_known_guidance, looks_at_the_whole
from .known_samplers import why_global
from .noise import WholeNoise

REGIONS = ("area", "gligen", "hooks", "default")
"""Keys of a conditioning for which ComfyUI evaluates it for a part of the latent, or separately from the others."""

FUNCTIONS = (
    "sampler_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_post_cfg_function",
    "sampler_calc_cond_batch_function",
    "model_function_wrapper",
)
"""Entries of model_options with a function of another node, or a list of functions."""


@dataclass(frozen=True)
class Sampling:
    """One call of a sampler's `sample`: the sampler, and the arguments in ComfyUI's order."""

    sampler: comfy.samplers.Sampler
    guider: comfy.samplers.CFGGuider
    sigmas: torch.Tensor  # [steps + 1]
    extra_args: dict[str, Any]
    callback: Callable | None
    noise: torch.Tensor  # [B, C, (T,) H, W], like the latent and the mask; of nested latents [B, 1, N]
    latent_image: torch.Tensor | None
    denoise_mask: torch.Tensor | None
    disable_pbar: bool

    @property
    def arguments(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))[1:]

    @property
    def stub(self) -> RemoteDiffusionModel:
        """The MODEL's diffusion_model. Only for a MODEL on ranks, as in wrappers that this pack adds."""
        return self.guider.inner_model.diffusion_model

    @property
    def conds(self) -> list[dict[str, Any]]:
        """The entries of all conditionings."""
        return [cond for conds in self.guider.conds.values() for cond in conds or ()]

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def shapes(self) -> Shapes:
        """Shapes of the latents. Of nested latents, the video's comes first."""
        return shapes_of_run(self.guider.inner_model, self.noise)

    @property
    def entries(self) -> int:
        """Batch entries of a model call: images times prompts."""
        prompts = 1 if self._has_one_prompt else sum(bool(conds) for conds in self.guider.conds.values())
        return len(self.noise) * max(1, prompts)

    @property
    def evaluated(self) -> list[Any]:
        """The conditionings that ComfyUI evaluates in a step."""
        conds = self.guider.conds
        return (
            [conds["positive"]] if self._has_one_prompt and set(conds) == {"positive", "negative"} else list(conds.values())
        )

    @property
    def _has_one_prompt(self) -> bool:
        both = self.guider.model_options.get("disable_cfg1_optimization", False)  # set by NAG, which needs both prompts
        return math.isclose(getattr(self.guider, "cfg", 1.0), 1.0) and not both

    @property
    def text_tokens(self) -> int:
        """Number of tokens of the longest prompt; 1 without a prompt."""
        texts = [cond["cross_attn"].shape[1] for cond in self.conds if cond.get("cross_attn") is not None]
        return max(texts, default=1)

    def band(
        self,
        cut: BandCut,
        index: int,
        guider: comfy.samplers.CFGGuider,
        options: dict[str, Any],
        draws: WholeNoise | None,
        callback: Callable,
    ) -> torch.Tensor:
        """Return the samples of this band, by the native sampler with the band's guider and model_options."""
        latent, mask = (
            None if whole is None else cut.band(whole, index) for whole in (self.latent_image, self.denoise_mask)
        )
        noise = cut.band(self.noise, index).clone()
        extra = {} if draws is None else {"noise_sampler": draws.band(cut, index)}
        # Without a mask the inpaint options only reseed torch's global generator, and all bands' threads would do so.
        inpaint = {} if mask is None else self.sampler.inpaint_options
        sampler = comfy.samplers.KSAMPLER(self.sampler.sampler_function, {**self.sampler.extra_options, **extra}, inpaint)
        extra_args = {**self.extra_args, "model_options": options}
        return sampler.sample(guider, self.sigmas, extra_args, callback, noise, latent, mask, True)


def region_of(cond: dict[str, Any]) -> str | None:
    """Return the first key of REGIONS that this conditioning has. None: it has none of them."""
    return next((key for key in REGIONS if cond.get(key) is not None and cond.get(key) is not False), None)


def why_not_displaced(sampling: Sampling) -> str | None:
    """Reason for the user why keys cannot be kept from call to call, for displaced patches or bands. None: they can."""
    if (key := next(filter(None, map(region_of, sampling.conds)), None)) is not None:
        return f"the conditioning has its own {key}"
    if sampling.stub.heads_of(sampling.guider.model_patcher.patches) > 1:
        return "a PDD acceleration LoRA has other output heads in each step"
    options = sampling.guider.model_options
    if wrappers := sampling.stub.wrappers(options, is_model_options=True):
        return f"{_owner(wrappers[0])}'s wrapper of the model needs whole calls"
    if options.get("context_handler") is not None:
        return "context windows call the model for parts of the latent"
    patchers = (each for each in vars(sampling.guider).values() if isinstance(each, comfy.model_patcher.ModelPatcher))
    if any(each.model is not sampling.guider.model_patcher.model for each in patchers):
        return f"the guider {type(sampling.guider).__name__} calls two models"
    return None


def why_not_banded(sampling: Sampling) -> str | None:
    """Return the reason for the user why this run cannot be cut into bands. None: it can."""
    guider, sampler = sampling.guider, sampling.sampler
    options = guider.model_options
    if (reason := why_not_displaced(sampling)) is not None:
        return reason
    if fun_controls(sampling.stub.own.kind, options.get("transformer_options", {})):
        return "Z-Image's Fun control needs the whole latent"
    if len(sampling.shapes) > 1 and any("mask" in cond for cond in sampling.conds):
        return "the conditioning has its own mask"
    patching, shape, own = sampling.stub.checkpoint.built.patching, sampling.shapes[0], sampling.stub.own
    if own.latent is not None and not own.latent.pads and patching.whole(patching.grid(shape)) != tuple(shape[2:]):
        return "the latent's height or width is not a multiple of the model's patch size"
    if name_of(type(guider)) not in PIXEL_WISE_GUIDERS | WHOLE_GUIDERS:
        return f"the guider {type(guider).__name__} may need the whole latent"
    if (reason := why_global(sampler)) is not None:
        return reason
    if is_sparse(options.get("transformer_options", {}).get(OVERRIDE)):
        return "Model Sparse Attention needs whole sequences. Use ulysses_degree instead to split them over GPUs"
    if sampling.denoise_mask is not None and sampler.inpaint_options.get("random"):
        return "random inpaint noise is drawn for the whole latent"
    for kind, function in functions_of(options):
        if not is_known_guidance(function):
            return f"{_owner(function)}'s {kind} may need the whole latent"
    if callbacks := guider.model_patcher.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE):
        return f"{_owner(callbacks[0])} is notified of each evaluation in turn"
    mask_function = options.get("denoise_mask_function")
    if sampling.denoise_mask is not None and mask_function is not None and name_of(mask_function) not in PIXEL_WISE_MASKS:
        return f"{_owner(mask_function)}'s denoise_mask_function may need the whole latent"
    return None


def why_wrapped(executor: comfy.patcher_extension.WrapperExecutor) -> str | None:
    """Return the reason for the user why the functions inside of a SAMPLER_SAMPLE wrapper cannot run for each band. None:
    they can. Bands call the sampler itself. A wrapper that another node adds after Apply PipeFusion would be left out."""
    inside = executor.wrappers[executor.idx + 1 :]
    others = [each for each in inside if not definition(each).__module__.startswith(f"{OURS}.")]
    return f"{_owner(others[0])}'s wrapper of the sampler needs the whole latent" if others else None


def _owner(function: Callable) -> str:
    """Return the name of the node that a function comes from, for the user."""
    return named(nodes_of(function)) or "another node"


def needs_the_whole(sampling: Sampling) -> bool:
    """Whether guidance needs the whole latent, so that bands need BandedGuidance."""
    functions = functions_of(sampling.guider.model_options)
    return name_of(type(sampling.guider)) in WHOLE_GUIDERS or any(looks_at_the_whole(function) for _, function in functions)


def functions_of(options: dict[str, Any]) -> Iterator[tuple[str, Callable]]:
    """(kind, function) for other nodes' functions around the model call and the guidance."""
    for kind in FUNCTIONS:
        value = options.get(kind) or ()
        yield from ((kind, function) for function in (value if isinstance(value, (list, tuple)) else (value,)))
    wrappers = comfy.patcher_extension.WrappersMP
    for kind in (wrappers.PREDICT_NOISE, wrappers.CALC_COND_BATCH, wrappers.APPLY_MODEL):
        all_wrappers = comfy.patcher_extension.get_all_wrappers(kind, options, is_model_options=True)
        yield from ((f"{kind} wrapper", each) for each in all_wrappers if each is not evaluate_concurrently)
