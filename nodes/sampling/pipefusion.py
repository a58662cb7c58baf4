"""PipeFusion under any native sampler: a SAMPLER_SAMPLE wrapper that runs the sampler once for each band of the latent."""

import contextlib
import copy
import functools
import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import torch
from tqdm.auto import tqdm

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.client.pipefusion.banded_run import BandedRun, NotLocal, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.memory_model import KV_COPIES, Request
from parallel_backend.placement.pipeline_model import choose_bands
from parallel_backend.processes.pool import RankLost
from parallel_backend.wire.sampling import RunStats

from ..model.call.diffusion_model import BAND_KEY, Band, RemoteDiffusionModel, remote_stub
from ..model.end_of_run import report_run
from ..model.run.band import NotTried
from ..model.run.kept_run import KeptBands, Load, kept
from ..model.run.sampling_run import CallShape
from ..ui.host import check_cancelled
from .band_guidance import BandedGuidance
from .band_guider import band_guider, banded_controls, releasing_waiters
from .closeness import Closeness, FewerPatches
from .eligibility import Sampling, needs_the_whole, why_not_banded, why_not_displaced, why_wrapped
from .host_sampling import on_host
from .known_samplers import takes_noise_sampler
from .noise import whole_noise

WRAPPER_KEY, AUTO_KEY = "parallel_dit_pipefusion", "parallel_dit_auto_degrees"
"""Keys of this wrapper, and of the wrapper that plans degrees at the first run (auto_degrees.py)."""


def apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate, min_closeness=0.0, is_asked=True):
    """(a clone of the MODEL with PipeFusion, the wrapper that runs it). `min_closeness`, `is_asked`: see PipeFusion."""
    remote_stub(model)  # refuses a native MODEL
    kind, patched = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE, model.clone()
    wrapper = PipeFusion(num_pipeline_patch, warmup_steps, overlap, extrapolate, min_closeness, is_asked)
    patched.remove_wrappers_with_key(kind, WRAPPER_KEY)
    patched.add_wrapper_with_key(kind, WRAPPER_KEY, wrapper)
    return patched, wrapper


def prove(sampling: Sampling, bands: bool) -> str:
    """Have ComfyUI's own class tried for the calls of this run, before its ranks load it. Returns why bands are not proven,
    if `bands`. Empty: they are."""

    def run(entries: dict[str, Any]) -> None:
        options = comfy.model_patcher.create_model_options_clone(sampling.extra_args["model_options"])
        options["transformer_options"].update(entries, sample_sigmas=sampling.sigmas)
        conds, x = sampling.evaluated, sampling.noise
        comfy.samplers.calc_cond_batch(sampling.guider.inner_model, conds, x, sampling.sigmas[:1].expand(len(x)), options)

    return sampling.stub.prove(run, [shape[1] for shape in sampling.shapes], bands)


def has_pipefusion(model: comfy.model_patcher.ModelPatcher) -> bool:
    """Whether PipeFusion is applied to the MODEL."""
    kind = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE
    return bool(model.get_wrappers(kind, WRAPPER_KEY))


def has_patches(model: RemoteTransformer, cut: BandCut) -> bool:
    """Whether a run with this cut can have patches. If not, it is exact."""
    return len(cut.rows) > 1 or model.degrees.displaced


log = logging.getLogger(__name__)
MOST_TRIALS = 4
"""Maximum number of trials during a run in bands, for calls that were not tried before. Each trial begins the run again."""


class StepCallbacks:
    """Step callbacks of the bands of `cut`. A step is reported, with the whole latent, once all bands have finished it.
    `device`: where ComfyUI's callback gets the latent, for the previews' decoder."""

    def __init__(self, cut: BandCut, total: int, callback, disable_pbar: bool, device: torch.device):
        self.cut, self.total, self.callback, self.device = cut, total, callback, device
        self._parts: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}  # by step and band: (denoised, x)
        self._bar = tqdm(total=total, disable=disable_pbar)

    def band(self, index: int):
        """The callback for one band's sampler. Runs on the band's thread."""

        def callback(step, denoised, x, total_steps):
            self._parts.setdefault(step, {})[index] = (denoised, x)

        return callback

    def drain(self) -> None:
        """Report finished steps to ComfyUI on its own thread: progress, preview, and its check for Cancel."""
        for step in list(self._parts):
            if len(self._parts[step]) < len(self.cut.rows):
                continue
            parts = self._parts.pop(step)
            self._bar.update()
            if self.callback is not None:
                wholes = (self.cut.whole([parts[band][part] for band in sorted(parts)]) for part in (0, 1))
                self.callback(step, *(to_device(whole, self.device) for whole in wholes), self.total)

    def close(self) -> None:
        self._bar.close()


@dataclass
class PipeFusion:
    """ComfyUI's SAMPLER_SAMPLE wrapper, with the settings of Apply PipeFusion. `min_closeness`: in dB; 0: none is asked for.
    `last`: report of the last run. `is_asked`: whether the user has asked for patches. If not, a run whose class has no
    proven patches is exact."""

    num_pipeline_patch: int
    warmup_steps: int
    overlap: bool
    extrapolate: bool
    min_closeness: float = 0.0
    is_asked: bool = True
    last: RunReport | None = field(default=None, repr=False)

    def __call__(self, executor, *arguments) -> torch.Tensor:
        """The samples, with the arguments and result of `sampler.sample`."""
        sampling = Sampling(executor.class_obj, *arguments)
        stub = sampling.stub
        reason = prove(sampling, stub.setup.degrees.pipe > 1 or stub.setup.degrees.displaced) or None
        if reason is not None and self.is_asked and not stub.setup.planned:
            raise ValueError(stub.without_bands(reason))
        return kept(stub, self._load(sampling), lambda model: self._sample(model, sampling, executor, reason))

    def _sample(self, model: RemoteTransformer, sampling: Sampling, executor, reason: str | None = None) -> torch.Tensor:
        """Return the samples of the whole latent. `model`: the model of `sampling` on its ranks. `reason`: why the run must
        be exact; None: it need not."""
        stub = sampling.stub
        started = time.perf_counter()
        found, cache = None, stub.run.cache
        stub.run.calls.clear()
        whole = CallShape((sampling.entries, *sampling.shapes[0][1:]), sampling.text_tokens)
        cut = self._cut(model, sampling)
        closeness = self._closeness(model, cut, sampling)
        if cache is not None:
            cache.restart(len(cut.rows))
        try:
            if reason is None:
                try:
                    found = self._in_patches(model, cut, sampling, executor, closeness)
                except FewerPatches:
                    cut = self._cut(model, sampling, model.degrees.pipe)
                    closeness = self._closeness(model, cut, sampling)
                    found = self._in_patches(model, cut, sampling, executor, closeness)
        except NotLocal as why:
            reason = str(why)
        if found is None:
            if reason is not None:
                log.warning("Parallel DiT: this run is exact, and therefore slower, because %s.", reason)
            if cache is not None:
                cache.restart()
        result, run = (executor(*sampling.arguments), None) if found is None else found
        stub.run.tell_again()  # of the last step
        stats: list[RunStats] = []  # stays empty if a guider's other model has replaced this one on the ranks
        model = run.model if run is not None else stub.run.loaded() or model  # others if ranks were lost
        with contextlib.suppress(RankLost):  # the samples are there
            if model.on_ranks:
                stats = model.close_run(run.run if run is not None else model.open_run(), check_cancelled)
        seconds = time.perf_counter() - started
        of_run = stub, model, seconds, sampling.steps
        if run is None:
            self.last = report_run(*of_run, stub.run.calls, reason=reason, stats=stats)
        else:
            calls = Counter({whole: run.exact_calls + run.banded_calls})
            expected = None if closeness is None else closeness.expected
            self.last = report_run(*of_run, calls, run.exact_calls, len(cut.rows), stats=stats, expected_db=expected)
        stub.run.calls.clear()
        log.info("Parallel DiT: %s, %s", model.degrees, ", ".join(self.last.shown))
        return result

    def _in_patches(
        self,
        model: RemoteTransformer,
        cut: BandCut,
        sampling: Sampling,
        executor,
        closeness: Closeness | None,
        trials: int = MOST_TRIALS,
    ) -> tuple[torch.Tensor, BandedRun] | None:
        """Return (samples, run), or None if there is only one patch. Calls that are not proven yet are tried, and the run
        begins again. Raises NotLocal if the run must be exact, or if it needs more than `trials` trials."""
        displaced = model.degrees.displaced
        if not has_patches(model, cut):
            return None
        if reason := why_not_displaced(sampling) if displaced else why_not_banded(sampling) or why_wrapped(executor):
            raise NotLocal(reason)
        try:
            if displaced:
                return self._displaced(model, cut, sampling, executor, closeness)
            return self._in_bands(model, cut, sampling, closeness)
        except NotTried as call:
            if trials == 0:
                raise
            call.prove()
            return self._in_patches(model, cut, sampling, executor, closeness, trials - 1)

    def _load(self, sampling: Sampling) -> Load:
        """Return a function that loads the model for the run, or returns it if it is on ranks."""
        return functools.partial(sampling.stub.transformer, functools.partial(self._expected, sampling))

    def _expected(self, sampling: Sampling) -> Request | None:
        """The run for which the ranks need memory when the model is loaded. None: the latent does not fit this model."""
        checkpoint, degrees, shape = sampling.stub.checkpoint, sampling.stub.setup.degrees, sampling.shapes[0]
        if 0 in shape or len(shape) != checkpoint.built.patching.axes:
            return None
        kv_copies = 0 if degrees.pipe == 1 and not degrees.displaced else KV_COPIES if self.extrapolate else 1
        bands = self.num_pipeline_patch or degrees.pipe
        return expected_request(checkpoint, shape, sampling.entries, sampling.text_tokens, kv_copies, bands)

    def _closeness(self, model: RemoteTransformer, cut: BandCut, sampling: Sampling) -> Closeness | None:
        """Return the object that measures the run's closeness. None: the user asks for none, there are no patches, or steps
        cannot be computed in both ways, because other nodes keep a state from call to call."""
        if not self.min_closeness:
            return None
        if not has_patches(model, cut):
            sampling.stub.run.note("min_closeness was not used, because the run is exact")
            return None
        if (
            sampling.stub.run.cache is not None
            or needs_the_whole(sampling)
            or any("control" in cond for cond in sampling.conds)
        ):
            sampling.stub.run.note("min_closeness was not used, because of a step cache, a ControlNet or a guidance node")
            return None
        noisy = takes_noise_sampler(sampling.sampler)
        return Closeness(cut, self.min_closeness, sampling.sigmas, model.degrees.pipe, noisy)

    def _cut(self, model: RemoteTransformer, sampling: Sampling, bands: int = 0) -> BandCut:
        """Return the cut of the latents into bands: a single band if there is no pipeline to fill. `bands`: their number. 0:
        as the settings say."""
        patching, shape = model.built.patching, sampling.shapes[0]
        if 0 in shape or len(shape) < 4:
            raise ValueError(f"latent_image: this latent has the shape {list(shape)} and no pixels.")
        grid = patching.grid(shape)
        if len(shape) == 5:  # a video; other shapes are images, or are refused by the model call
            patching = patching.cut(patching.best_axis(grid))
        if model.degrees.patch > 1 or model.degrees.pipe == 1:  # patches need a second stage
            return BandCut(patching, (Span(0, shape[patching.band_dim]),), sampling.shapes)
        bands = (
            bands
            or self.num_pipeline_patch
            or choose_bands(
                model.degrees.pipe, grid[patching.band_dim], sampling.steps, model.stage_costs(grid), sampling.entries
            )
        )
        whole_calls = (sampling.stub.run.whole_calls or {}).values()
        text = max((each.text for each in whole_calls), default=0)
        references = max((each.references for each in whole_calls), default=0)
        rows = cut_rows(shape, bands, patching, text, references)
        return BandCut(patching, rows, sampling.shapes)

    def _displaced(
        self, model: RemoteTransformer, cut: BandCut, sampling: Sampling, executor, closeness: Closeness | None
    ) -> tuple[torch.Tensor, BandedRun]:
        """Displaced patches: the sampler runs once, on ComfyUI's thread. Its calls belong to one run on the ranks."""
        extrapolate = self.extrapolate and not takes_noise_sampler(sampling.sampler)
        run = self._banded_run(model, cut, sampling.stub, True, extrapolate)
        options = comfy.model_patcher.create_model_options_clone(sampling.extra_args["model_options"])
        limit = exact_above(sampling.sigmas, self.warmup_steps)
        poll = KeptBands(sampling.stub, run, self._load(sampling))
        band = Band(run, 0, limit, sampling.stub, sampling.shapes, sampling.shapes, poll)
        options["transformer_options"][BAND_KEY] = band
        guider = copy.copy(sampling.guider)
        if closeness is not None:
            closeness.give_to(guider, band)
        arguments = replace(sampling, guider=guider, extra_args={**sampling.extra_args, "model_options": options}).arguments
        try:
            return executor(*arguments), run
        except BaseException:  # Cancel too
            run.model.discard_run(run.run)
            raise

    def _in_bands(
        self, model: RemoteTransformer, cut: BandCut, sampling: Sampling, closeness: Closeness | None
    ) -> tuple[torch.Tensor, BandedRun]:
        """Return (samples of the whole latent, the run). Raises NotLocal if the sampler needs more than its band."""
        draws = None
        if takes_noise_sampler(sampling.sampler):
            draws = whole_noise(sampling.sampler, sampling.noise, sampling.sigmas, sampling.extra_args.get("seed"))
        device, sampling = sampling.noise.device, on_host(sampling)
        # Noise between steps makes the change of keys random, and extrapolating it is worse than taking old keys.
        extrapolate = self.extrapolate and draws is None
        run = self._banded_run(model, cut, sampling.stub, self.warmup_steps > 0, extrapolate)
        limit = exact_above(sampling.sigmas, self.warmup_steps)
        steps = StepCallbacks(cut, sampling.steps, sampling.callback, sampling.disable_pbar, device)
        controls = banded_controls(sampling.guider, cut, limit, extrapolate, device)
        guidance = BandedGuidance(cut, limit, extrapolate) if needs_the_whole(sampling) else None
        exchanges = [*controls.values(), *filter(None, (guidance, closeness))]

        def sample(band: int) -> torch.Tensor:
            with releasing_waiters(exchanges, band):
                guider = band_guider(sampling.guider, cut, band, controls)
                options = comfy.model_patcher.create_model_options_clone(sampling.extra_args["model_options"])
                call_options = options["transformer_options"]
                marked = Band(run, band, limit, sampling.stub, cut.shapes_of(band), cut.shapes)
                call_options[BAND_KEY] = marked
                call_options["sample_sigmas"] = sampling.sigmas
                if guidance is not None:
                    guidance.give_to(guider, band, options)
                if closeness is not None:
                    closeness.give_to(guider, marked)
                return sampling.band(cut, band, guider, options, draws, steps.band(band))

        try:
            parts = run_bands(run, sample, steps.drain, KeptBands(sampling.stub, run, self._load(sampling)))
            steps.drain()
        except BaseException:  # Cancel too
            run.model.discard_run(run.run)
            raise
        finally:
            steps.close()
        if guidance is not None:
            guidance.keep()
        return cut.whole(parts).to(device), run

    def _banded_run(
        self, model: RemoteTransformer, cut: BandCut, stub: RemoteDiffusionModel, warm_up: bool, extrapolate: bool
    ) -> BandedRun:
        """Open a run. `model` and `stub`: the same model, on its ranks and in this process."""
        companion_tokens, cache = cut.patching.companion_tokens(cut.shapes), stub.run.cache
        return BandedRun(
            model,
            cut.rows,
            cut.shapes[0],
            warm_up,
            overlap=self.overlap and stub.comm_overlap,
            extrapolate=extrapolate,
            cache=None if cache is None else cache.cache,
            poll=check_cancelled,
            along=cut.patching.along,
            companion_tokens=companion_tokens,
            is_kept=True,
        )
