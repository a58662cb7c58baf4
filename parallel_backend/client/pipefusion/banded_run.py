"""PipeFusion from the sampler's side: each band's sampler runs in a thread and asks for its own predictions.

The bands' requests are posted in the order of pipefusion_order.py, whatever the threads' timing. At an exact call the bands
meet: their latents run as one, and each band gets its own rows of the answer.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from parallel_backend.client.call import Conditioning, ModelCall, PostedCall, Residuals, TokenLayout
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.step_cache import Computed, Forecast, StepCache
from parallel_backend.core.pipefusion_order import MicroStep, call_steps
from parallel_backend.core.spans import Span, split_carrying
from parallel_backend.families.base.patching import Latents, Patching, latents_of, like
from parallel_backend.processes.pool import Poll, wait_for


class NotLocal(Exception):
    """The bands asked for different things: this sampler looks at more than its own rows. Run it whole instead."""


def cut_rows(shape: tuple[int, ...], bands: int, patching: Patching, text: int = 0, references: int = 0) -> tuple[Span, ...]:
    """Spans of a latent's rows (or frames), one per band, on token borders; fewer than asked for where they run out.

    `text`: tokens that run with the first band beside its own, which therefore has fewer rows (Family.text_tokens).
    `references`: tokens of reference pictures, which are spread over all rows.
    """
    size, patch, grid = shape[patching.band_dim], patching.band_size, patching.grid(shape)
    rows = grid[patching.band_dim]
    row = patching.row_tokens(grid) + references / rows
    token_rows = split_carrying(Span(0, rows), min(bands, rows), text / row)
    return tuple(Span(band.start * patch, min(band.stop * patch, size)) for band in token_rows)


def exact_above(sigmas: torch.Tensor, warmup_steps: int) -> float:
    """Model calls at larger sigmas belong to the first `warmup_steps` of the steps `sigmas` [steps + 1], and run exact."""
    if warmup_steps == 0:
        return float("inf")
    if warmup_steps >= len(sigmas) - 1:
        return -1.0
    return float(sigmas[warmup_steps]) * (1 + 1e-6)


@dataclass(frozen=True, eq=False)
class _Request:
    band: int
    call: ModelCall
    exact: bool
    latents: Latents  # the call's, on the CPU
    timestep: torch.Tensor  # the call's, float32 on the CPU
    future: Future = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class _DueStep:
    """A micro-step of the newest call that is not posted yet."""

    step: MicroStep
    first: _Request  # the first band's in that call
    computed: Computed | None  # takes the call's output for the step cache, if there is one


class BandedRun:
    """One sampling run in bands. `rows`: each band's latent rows, or frames if `along` is "frames"; `shape`: of the whole
    latent; `companion_tokens`: tokens of its companion, if there is one.

    With `warm_up`, the first call for conditioning whose keys the buffers do not hold yet is exact, whenever it comes. So is
    the first one behind a timestep at which there was none: the keys are older than a step then.
    `overlap`, `extrapolate`: see sampling.Step and OpenRun. `cache`: a StepCache for as many bands, to forecast calls.
    `poll` runs while the ranks are asked what memory they have.

    With displaced patches the run is one band of all rows, whose calls are stale unless they are exact. There the first
    call for a conditioning is always exact: a patch rank has no other way to the other bands' keys.
    """

    def __init__(
        self,
        model: RemoteTransformer,
        rows: tuple[Span, ...],
        shape: tuple[int, ...],
        warm_up: bool,
        overlap: bool = True,
        extrapolate: bool = True,
        cache: StepCache | None = None,
        poll: Poll = lambda: None,
        along: str = "rows",
        companion_tokens: int = 0,
    ):
        assert cache is None or cache.bands == len(rows)
        assert len(rows) == 1 or not model.degrees.displaced
        self.model, self.rows, self.overlap = model, rows, overlap
        self.warm_up = warm_up or model.degrees.displaced
        self.patching = model.family.patching.cut(along)
        self.layout = TokenLayout(self.patching.grid(shape), along, companion_tokens)
        self.run = model.open_run(extrapolate)
        try:
            model.watch_memory(self.run, len(rows), extrapolate, poll)
        except BaseException:  # Cancel too
            model.discard_run(self.run)
            raise
        self.exact_calls, self.banded_calls = 0, 0
        self._lock = threading.RLock()  # of what is posted; who has it may wait for memory, and so for the ranks
        self._answering = threading.Lock()  # of `_open` alone: the pool's thread answers, and must not wait for who posts
        self._calls = [0] * len(rows)  # calls made so far, per band
        self._waiting: dict[tuple[int, int], _Request] = {}  # by (call, band): not posted yet
        self._open: list[_Request] = []  # not answered yet, posted or not
        self._begun = 0  # calls of which it is decided how they run
        self._due: deque[_DueStep] = deque()  # of the newest of them
        self.cache = cache
        self._forecasts: dict[int, tuple[torch.Tensor, Forecast]] = {}  # by call: its timestep, and what answers it
        # Conditionings with keys in the buffers -> number of the timestep of their last call.
        self._known: dict[int, int] = {}
        self._times, self._time = 0, float("nan")  # timesteps so far, and the newest
        self._finished: set[int] = set()
        self._error: BaseException | None = None

    def predict(
        self,
        band: int,
        call: ModelCall,
        exact: bool,
        poll: Poll | None = None,
        on_posted: Callable[[], None] = lambda: None,
    ) -> torch.Tensor | Latents:
        """The model's output for a call with the band's latents (Patching.band). Blocks; raises what `abort` or `poll`
        raised, or RankError.

        Bands need no `poll`: each of them waking up many times a second would take the cores that CPU ranks compute on, and
        whoever looks for Cancel aborts them. `on_posted`: see RemoteTransformer.predict. All bands give the same
        `first_replica` and `changes` in the same call.
        """
        latents = tuple(latent.cpu() for latent in latents_of(call.x))
        request = _Request(band, call, exact, latents, call.timestep.cpu().float())
        with self._lock:
            if self._error is not None:
                raise self._error
            self._waiting[self._calls[band], band] = request
            with self._answering:
                self._open.append(request)
            self._calls[band] += 1
            self._post_what_can_go()
        on_posted()
        return request.future.result() if poll is None else wait_for(request.future, poll)

    def note_exact(self) -> None:
        """A call of its sampler was made beside it, and was exact."""
        with self._lock:
            self.exact_calls += 1

    def finish(self, band: int) -> None:
        """The band's sampler has returned."""
        with self._lock:
            self._finished.add(band)
            self._post_what_can_go()
            if self._error is None and len(self._finished) == len(self.rows) and len(set(self._calls)) > 1:
                raise NotLocal("the bands did not make the same number of model calls")

    def abort(self, error: BaseException) -> None:
        """Every unanswered and every later `predict` raises `error`."""
        with self._lock:
            if self._error is None:
                self._error = error
                self._waiting.clear()
                self.model.abandon(self.run)
                with self._answering:
                    unanswered = list(self._open)
                for request in unanswered:
                    self._settle(request, error)

    def _post_what_can_go(self) -> None:
        """Post micro-steps in their order, as far as the bands have asked for them."""
        while self._error is None:
            self._answer_forecasts()
            if not self._waiting:
                return
            if not self._due:
                if not self._begin_call():
                    return
                continue
            due = self._due[0]
            keys = [(due.step.call, band) for band in due.step.covers(len(self.rows))]
            missing = {band for call, band in keys if (call, band) not in self._waiting}
            if missing:
                if missing & self._finished:
                    self.abort(NotLocal("the bands did not make the same number of model calls"))
                return
            requests = [self._waiting.pop(key) for key in keys]
            if any(not torch.equal(request.timestep, due.first.timestep) for request in requests):
                self.abort(NotLocal("the bands are at different timesteps"))
                return
            self._due.popleft()
            if due.step.band is None:
                self._post_exact(due, requests, self._conditioning(requests[0]))
            else:
                self._post_band(due, requests[0], self._conditioning(requests[0]))

    def _begin_call(self) -> bool:
        """Decide by the first band's request whether the next call is exact, banded or forecast. False: it has not asked."""
        call = self._begun
        request = self._waiting.get((call, 0))
        if request is None:
            if 0 in self._finished:
                self.abort(NotLocal("the bands did not make the same number of model calls"))
            return False
        self._begun += 1
        conditioning = self._conditioning(request)
        time = float(request.timestep.max())
        if time != self._time:
            self._times, self._time = self._times + 1, time
        rested = self._times - self._known.get(conditioning.id, -1) > 1  # also if it was never called
        self._known[conditioning.id] = self._times
        exact = request.exact or (self.warm_up and rested)
        allowed = request.call.may_forecast and not exact
        entry = None if self.cache is None else self.cache.call(conditioning.id, time, allowed)
        if isinstance(entry, Forecast):
            self._forecasts[call] = (request.timestep, entry)
        else:
            self._due.extend(_DueStep(step, request, entry) for step in call_steps(call, exact, len(self.rows)))
        return True

    def _conditioning(self, request: _Request) -> Conditioning:
        return self.model.conditioning(request.call, self.layout)

    def _answer_forecasts(self) -> None:
        """Answer every band that asks for a call that is forecast: it waits for no other band, and no other for it."""
        for call, band in [waiting for waiting in self._waiting if waiting[0] in self._forecasts]:
            request, (timestep, forecast) = self._waiting.pop((call, band)), self._forecasts[call]
            if not torch.equal(request.timestep, timestep):
                self.abort(NotLocal("the bands are at different timesteps"))
                return
            self._settle(request, forecast.output(band))
        for call in [call for call in self._forecasts if call < min(self._calls)]:  # every band has asked
            del self._forecasts[call]

    def _post_exact(self, due: _DueStep, requests: list[_Request], conditioning: Conditioning) -> None:
        latents = self.patching.join([request.latents for request in requests])
        parts = list(zip(requests, self.rows, strict=True))
        residuals = _side_by_side([request.call.residuals for request in requests])
        tokens = self.patching.pack_all(latents)
        call = PostedCall(
            tokens,
            requests[0].timestep,
            conditioning,
            conditioning.token_order.span,
            run=self.run,
            overlap=self.overlap,
            residuals=residuals,
        )
        self._post(call, latents, parts, due.computed)
        self.exact_calls += 1

    def _post_band(self, due: _DueStep, request: _Request, conditioning: Conditioning) -> None:
        patch, rows = self.patching.band_size, self.rows[request.band]
        x, *companion = request.latents
        if padding := -len(rows) % patch:
            # An odd height is padded circularly, as ComfyUI does: the last row's neighbour is the picture's first one.
            top = self.patching.rows(due.first.latents[0], Span(0, padding))
            x = torch.cat((x, top), dim=self.patching.band_dim)
        latents = (x, *companion)
        call = PostedCall(
            self.patching.pack_all(latents),
            request.timestep,
            conditioning,
            conditioning.token_order.of_rows(Span(rows.start // patch, -(-rows.stop // patch))),
            with_text=due.step.with_text,
            run=self.run,
            stale=self.model.degrees.displaced,
            overlap=self.overlap,
            residuals=request.call.residuals,
        )
        self._post(call, latents, [(request, Span(0, len(rows)))], due.computed)
        self.banded_calls += due.step.with_text

    def _post(
        self, call: PostedCall, latents: Latents, requests: list[tuple[_Request, Span]], computed: Computed | None
    ) -> None:
        """Post the call, whose latents are `latents`, and give each request its rows of the answer; the first request gets
        the companion too."""

        def share(done: Future) -> None:
            if (error := done.exception()) is not None:
                for request, _ in requests:
                    self._settle(request, error)
                return
            whole = self.patching.unpack_all(done.result(), [tuple(latent.shape) for latent in latents])
            for request, rows in requests:
                outputs = self.patching.band(whole, rows)
                if computed is not None:
                    computed.outputs[request.band] = outputs
                self._settle(request, outputs)

        call.future.add_done_callback(share)
        self.model.post(call)

    def _settle(self, request: _Request, answer: Latents | BaseException) -> None:
        with self._answering:
            still_open = [other for other in self._open if other is not request]
            if len(still_open) == len(self._open):  # aborted: the output came too late
                return
            self._open = still_open
        if isinstance(answer, BaseException):
            request.future.set_exception(answer)
        else:
            device = latents_of(request.call.x)[0].device
            request.future.set_result(like(request.call.x, tuple(part.to(device, non_blocking=True) for part in answer)))


def _side_by_side(bands: list[Residuals]) -> Residuals:
    """The bands' residuals as the whole picture's; blocks that had one tensor in the bands have one again."""
    made: dict[tuple[int, ...], torch.Tensor] = {}
    whole = {}
    for block in bands[0]:
        parts = [residuals[block] for residuals in bands]
        key = tuple(map(id, parts))
        if key not in made:
            made[key] = torch.cat(parts, dim=1)
        whole[block] = made[key]
    return whole
