"""PipeFusion under any native sampler: a SAMPLER_SAMPLE wrapper that runs the sampler once per band of the latent."""

import logging
import queue
import time
from dataclasses import dataclass, field

import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import torch
from tqdm.auto import tqdm

from parallel_backend.bands import BandedRun, NotLocal, cut_rows, run_bands
from parallel_backend.client import RemoteTransformer
from parallel_backend.report import RunReport
from parallel_backend.schedule import choose_bands

from .noise import takes_noise_sampler, whole_noise
from .remote_model import BAND_KEY, Band, RemoteDiffusionModel, check_cancelled

log = logging.getLogger(__name__)

LOCAL_GUIDERS = {"CFGGuider", "Guider_Basic", "Guider_DualCFG"}
"""Guiders whose result at a pixel depends on nothing but the predictions at that pixel."""
COND_KEYS_OF_A_REGION = ("area", "mask", "gligen", "control", "hooks", "default")
GLOBAL_OPTIONS = (
    "sampler_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_post_cfg_function",
    "sampler_calc_cond_batch_function",
    "model_function_wrapper",
)
"""Entries of model_options that hold other nodes' functions, which may look at the whole latent (norms, projections)."""


def why_whole(guider, sampler, noise: torch.Tensor) -> str | None:
    """Why this run cannot be cut into bands, in words for the user; None if it can."""
    options = guider.model_options
    if noise.ndim != 4:
        return "its latent is not an image"
    if type(guider).__name__ not in LOCAL_GUIDERS:
        return f"the guider {type(guider).__name__} may look at the whole latent"
    if type(sampler) is not comfy.samplers.KSAMPLER:
        return f"{type(sampler).__name__} is not one of ComfyUI's samplers"
    function = sampler.sampler_function
    if not function.__module__.startswith("comfy."):
        return f"{function.__name__} is not one of ComfyUI's samplers"
    if function.__name__ in ("dpm_adaptive_function", "sample_dpm_adaptive"):
        return "dpm_adaptive sets its step size by the whole latent"
    if sampler.inpaint_options.get("random"):
        return "random inpaint noise is drawn for the whole latent"
    for name in GLOBAL_OPTIONS:
        if options.get(name):
            return f"another node's {name} may look at the whole latent"
    wrappers = comfy.patcher_extension.WrappersMP
    for kind in (wrappers.PREDICT_NOISE, wrappers.CALC_COND_BATCH, wrappers.APPLY_MODEL):
        if comfy.patcher_extension.get_all_wrappers(kind, options, is_model_options=True):
            return f"another node's {kind} wrapper may look at the whole latent"
    for conds in guider.conds.values():
        for cond in conds or ():
            for key in COND_KEYS_OF_A_REGION:
                if cond.get(key) is not None and cond.get(key) is not False:
                    return f"the conditioning has its own {key}"
    return None


class Steps:
    """Collects the bands' step callbacks; hands a step on, with the whole latent, once every band has made it."""

    def __init__(self, bands: int, total: int, callback, disable_pbar: bool):
        self.bands, self.total, self.callback = bands, total, callback
        self._parts: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._whole: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._bar = tqdm(total=total, disable=disable_pbar)

    def band(self, index: int):
        """The callback for one band's sampler; runs on the band's thread."""

        def callback(step, denoised, x, total_steps):
            parts = self._parts.setdefault(step, {})
            parts[index] = (denoised, x)
            if len(parts) == self.bands:
                self._whole.put(step)

        return callback

    def drain(self) -> None:
        """Report finished steps to ComfyUI, on its own thread: progress, preview, and its check for Cancel."""
        while not self._whole.empty():
            step = self._whole.get()
            parts = self._parts.pop(step)
            self._bar.update()
            if self.callback is not None:
                denoised, x = (torch.cat([parts[band][part] for band in range(self.bands)], 2) for part in (0, 1))
                self.callback(step, denoised, x, self.total)

    def close(self) -> None:
        self._bar.close()


@dataclass
class PipeFusion:
    """The settings of Apply PipeFusion, and the wrapper itself. `last`: the report of the last run, for the node."""

    num_pipeline_patch: int
    warmup_steps: int
    overlap: bool
    last: RunReport | None = field(default=None, repr=False)

    def __call__(self, executor, guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar):
        """ComfyUI's SAMPLER_SAMPLE wrapper: same arguments and result as `sampler.sample`."""
        arguments = (callback, noise, latent_image, denoise_mask, disable_pbar)
        stub: RemoteDiffusionModel = guider.inner_model.diffusion_model
        model = stub.transformer()
        started = time.perf_counter()
        result, run, reason = None, None, why_whole(guider, executor.class_obj, noise)
        bands = self.num_pipeline_patch or choose_bands(model.degrees.pipe, -(-noise.shape[2] // model.family.patch_rows))
        rows = cut_rows(noise.shape[2], bands, model.family.patch_rows)
        if reason is None and len(rows) > 1:
            try:
                result, run = self._banded(model, stub, rows, executor.class_obj, guider, sigmas, extra_args, *arguments)
            except NotLocal as why:
                reason = str(why)
        if result is None:
            if reason is not None:
                log.warning("PipeFusion: this run is exact and unpipelined, since %s.", reason)
            result = executor(guider, sigmas, extra_args, *arguments)
        stats = model.close_run(run.run if run is not None else model.open_run(), check_cancelled)
        seconds, steps = time.perf_counter() - started, len(sigmas) - 1
        calls = (run.exact_calls, run.banded_calls) if run is not None else None
        self.last = RunReport(
            model.degrees, len(rows) if run is not None else 1, steps, seconds, calls, reason, tuple(stats)
        )
        return result

    def _banded(
        self,
        model: RemoteTransformer,
        stub,
        rows,
        sampler,
        guider,
        sigmas,
        extra_args,
        callback,
        noise,
        latent,
        mask,
        quiet,
    ):
        """The run in bands: (samples of the whole latent, the run). Raises NotLocal if the sampler turns out global."""
        run = BandedRun(model, rows, tuple(noise.shape), self.warmup_steps > 0, self.overlap and stub.comm_overlap)
        exact_above = float("inf") if self.warmup_steps == 0 else _last_warm_up_sigma(sigmas, self.warmup_steps)
        draws = whole_noise(sampler, noise, sigmas, extra_args.get("seed")) if takes_noise_sampler(sampler) else None
        steps = Steps(len(rows), len(sigmas) - 1, callback, quiet)

        def sample(band: int) -> torch.Tensor:
            span = rows[band]

            def cut(tensor):
                return None if tensor is None else tensor[:, :, span.slice]

            options = comfy.model_patcher.create_model_options_clone(extra_args["model_options"])
            options["transformer_options"][BAND_KEY] = Band(run, band, exact_above)
            own = sampler
            if draws is not None:
                extra = {**sampler.extra_options, "noise_sampler": draws.band(span)}
                own = comfy.samplers.KSAMPLER(sampler.sampler_function, extra, sampler.inpaint_options)
            arguments = {**extra_args, "model_options": options}
            return own.sample(guider, sigmas, arguments, steps.band(band), cut(noise).clone(), cut(latent), cut(mask), True)

        try:
            parts = run_bands(run, sample, steps.drain, check_cancelled)
        except BaseException:  # Cancel too
            model.discard_run(run.run)
            raise
        finally:
            steps.close()
        steps.drain()
        return torch.cat(parts, 2), run


def _last_warm_up_sigma(sigmas: torch.Tensor, warmup_steps: int) -> float:
    """Calls at larger sigmas belong to the first `warmup_steps` steps."""
    if warmup_steps >= len(sigmas) - 1:
        return -1.0
    return float(sigmas[warmup_steps]) * (1 + 1e-6)
