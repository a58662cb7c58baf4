"""PipeFusion on the sampler's side: each band's sampler runs in a thread and requests predictions for its band.

The bands' requests are posted in the order of pipefusion_order.py, independent of the threads' timing. An exact call waits
for all bands: their latents are joined, and each band gets its rows of the output.
"""

import threading
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from parallel_backend.client.call import Conditioning, ModelCall, PostedCall, Residuals, StartNext, TokenLayout
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.step_cache import Computed, Forecast, StepCache
from parallel_backend.core.device_copies import to_device
from parallel_backend.core.pipefusion_order import MicroStep, call_steps
from parallel_backend.core.spans import Span, split_carrying
from parallel_backend.own_class.calls.patching import Latents, Patching, latents_of, like
from parallel_backend.processes.pool import DeviceFull, Poll, RankLost, wait_for


class NotLocal(Exception):
    """Raised if the bands made different calls: this sampler depends on more than its band's rows. Run it whole instead."""


def cut_rows(shape: tuple[int, ...], bands: int, patching: Patching, text: int = 0, references: int = 0) -> tuple[Span, ...]:
    """Return spans of a latent's rows (or frames) on token borders, one for each band; fewer than `bands` if there are too
    few rows.

    `text`: text tokens (BuiltClass.text_tokens). They run with the first band, which has fewer rows for that. `references`:
    tokens of reference images, which are spread over all rows.
    """
    size, patch, grid = shape[patching.band_dim], patching.band_size, patching.grid(shape)
    rows = grid[patching.band_dim]
    row = patching.row_tokens(grid) + references / rows
    token_rows = split_carrying(Span(0, rows), min(bands, rows), text / row)
    return tuple(Span(band.start * patch, min(band.stop * patch, size)) for band in token_rows)


def exact_above(sigmas: torch.Tensor, warmup_steps: int) -> float:
    """The sigma above which model calls belong to the first `warmup_steps` steps of `sigmas` [steps + 1] and are exact."""
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
    apart: bool
    latents: Latents  # the call's, on the CPU
    timestep: torch.Tensor  # the call's, float32 on the CPU
    future: Future = field(default_factory=Future)  # gives the output for `call`


@dataclass(frozen=True, eq=False)
class _DueStep:
    """A micro-step of the newest call that is not posted yet."""

    step: MicroStep
    first: _Request  # the first band's in that call
    computed: Computed | None  # takes the call's output for the step cache, if there is one


class BandedRun:
    """One sampling run in bands. `rows`: each band's latent rows, or frames if `along` is "frames". `shape`: of the whole
    latent.

    `companion_tokens`: number of tokens of its companion. `overlap`, `extrapolate`: see sampling.Step and OpenRun. `cache`:
    forecasts calls of as many bands. `poll` is called while ranks are asked for their free memory.

    With `warm_up` the first call for a conditioning is exact, because its buffers have no keys yet. A call is also exact if
    its conditioning had no call at the previous timestep: its keys would be older than one step.

    With displaced patches the run is one band of all rows, whose calls are stale unless they are exact. The first call for a
    conditioning is always exact, because a patch rank gets the other patches' keys only by an earlier call.

    With `is_kept` lost ranks do not end the run: somebody must check `lost` and call `go_on` or `abort`.
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
        is_kept: bool = False,
    ):
        assert cache is None or cache.bands == len(rows)
        assert len(rows) == 1 or not model.degrees.displaced
        self.model, self.rows, self.overlap = model, rows, overlap
        self.warm_up = warm_up or model.degrees.displaced
        self.patching = model.built.patching.cut(along)
        self.layout = TokenLayout(self.patching.grid(shape), along, companion_tokens)
        self.extrapolate, self.is_kept = extrapolate, is_kept
        self.lost: DeviceFull | RankLost | None = None
        """Why the ranks are lost. Until `go_on`, calls wait without an answer. None: they are not lost."""
        self._alone = False  # no rank computes patches any more
        self._open_run(poll)
        self.exact_calls, self.banded_calls = 0, 0
        self._lock = threading.RLock()  # its holder posts, and may wait for memory and so for the ranks
        self._answering = threading.Lock()  # for `_open` only: the pool's thread answers, and must not wait for a poster
        self._calls = [0] * len(rows)  # calls made so far, per band
        self._waiting: dict[tuple[int, int], _Request] = {}  # by (call, band): not posted yet
        self._requests: dict[tuple[int, int], _Request] = {}  # by (call, band): of calls that may have to be made again
        self._open: list[_Request] = []  # not answered yet, posted or not
        self._begun = 0  # calls that are decided on: exact, banded or forecast
        self._due: deque[_DueStep] = deque()  # of the newest call that is decided on
        self.cache = cache
        self._forecasts: dict[int, tuple[torch.Tensor, Forecast]] = {}  # by call: its timestep, and what answers it
        self._known: dict[int, int] = {}  # conditioning with keys in the buffers -> number of its last call's timestep
        self._times, self._time = 0, float("nan")  # timesteps so far, and the newest
        self._finished: set[int] = set()
        self._error: BaseException | None = None

    def predict(
        self,
        band: int,
        call: ModelCall,
        exact: bool,
        poll: Poll | None = None,
        on_posted: StartNext = None,
        apart: bool = False,
    ) -> torch.Tensor | Latents:
        """The model's output for a call with the band's latents (Patching.band). Raises the error of `abort` or `poll`.

        Without `poll` the thread sleeps until the output comes, and leaves its core to CPU ranks; `abort` wakes it.
        `apart`: whether an exact call leaves the run's keys and values as they are. In a call all bands pass the same
        `apart`, `first_replica` and `changes`.
        """
        latents = tuple(latent.cpu() for latent in latents_of(call.x))
        request = _Request(band, call, exact, apart, latents, call.timestep.cpu().float())
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.is_kept:
                self._requests = self._incomplete() | {(self._calls[band], band): request}
            self._waiting[self._calls[band], band] = request
            with self._answering:
                self._open.append(request)
            self._calls[band] += 1
            self._post_what_can_go()
        if on_posted is not None:
            on_posted()
        return request.future.result() if poll is None else wait_for(request.future, poll)

    def note_exact(self) -> None:
        """Count an exact call that the sampler made without this object."""
        with self._lock:
            self.exact_calls += 1

    def finish(self, band: int) -> None:
        """Record that the band's sampler has returned. Raises NotLocal if all have, after different numbers of calls."""
        with self._lock:
            self._finished.add(band)
            self._post_what_can_go()
            if self._error is None and len(self._finished) == len(self.rows) and len(set(self._calls)) > 1:
                raise NotLocal("the patches did not make the same number of model calls")

    def abort(self, error: BaseException) -> None:
        """Have every `predict`, waiting or later, raise `error`."""
        with self._lock:
            if self._error is None:
                self._error = error
                self._waiting.clear()
                self.model.abandon(self.run)
                with self._answering:
                    unanswered = list(self._open)
                for request in unanswered:
                    self._settle(request, error)

    def go_on(self, model: RemoteTransformer, cache: StepCache | None, poll: Poll) -> None:
        """Continue after lost ranks with `model`, which has others, perhaps with other degrees.

        All bands repeat the calls that some band waits for. The first call of a conditioning is exact, because the new ranks
        have no keys. If they have neither stages nor displaced patches, all further calls are exact. `cache`, `poll`: as for
        the constructor.
        """
        with self._lock:
            with self._answering:
                self.model, self.cache, self.lost = model, cache, None
            self.warm_up, self._alone = True, model.degrees.pipe == 1 and not model.degrees.displaced
            self._requests = self._incomplete()
            self._waiting = dict(self._requests)
            self._begun = min((call for call, _ in self._requests), default=self._begun)
            self._due.clear()
            self._forecasts.clear()
            self._known.clear()
            self._time = float("nan")
            try:
                self._open_run(poll)
            except (DeviceFull, RankLost) as error:
                self._lose(model, error)
            self._post_what_can_go()

    def _open_run(self, poll: Poll) -> None:
        self.run = self.model.open_run(self.extrapolate)
        if self._alone:  # no keys are kept
            return
        try:
            self.model.watch_memory(self.run, len(self.rows), self.extrapolate, poll)
        except BaseException:  # Cancel too
            self.model.discard_run(self.run)
            raise

    def _incomplete(self) -> dict[tuple[int, int], _Request]:
        """Return the requests of calls for which at least one band has no answer yet."""
        answered = Counter(call for (call, _), request in self._requests.items() if request.future.done())
        return {key: request for key, request in self._requests.items() if answered[key[0]] < len(self.rows)}

    def _lose(self, model: RemoteTransformer, error: DeviceFull | RankLost) -> None:
        """Record that the ranks of `model` are lost. Ignored if it was replaced already, because each of its calls fails."""
        with self._answering:
            if model is self.model and self.lost is None:
                self.lost = error

    def _post_what_can_go(self) -> None:
        """Like `_post_in_order`, but records lost ranks."""
        try:
            self._post_in_order()
        except (DeviceFull, RankLost) as error:
            if not self.is_kept:
                raise
            self._lose(self.model, error)

    def _post_in_order(self) -> None:
        """Post due micro-steps in order, until one has a band that has not made its request yet."""
        while self._error is None and self.lost is None:
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
                    self.abort(NotLocal("the patches did not make the same number of model calls"))
                return
            requests = [self._waiting.pop(key) for key in keys]
            if any(not torch.equal(request.timestep, due.first.timestep) for request in requests):
                self.abort(NotLocal("the patches are at different timesteps"))
                return
            self._due.popleft()
            if due.step.band is None:
                self._post_exact(due, requests, self._conditioning(requests[0]))
            else:
                self._post_band(due, requests[0], self._conditioning(requests[0]))

    def _begin_call(self) -> bool:
        """Decide by the first band's request whether the next call is exact, banded or forecast. Returns whether there is
        one."""
        call = self._begun
        request = self._waiting.get((call, 0))
        if request is None:
            if 0 in self._finished:
                self.abort(NotLocal("the patches did not make the same number of model calls"))
            return False
        self._begun += 1
        conditioning = self._conditioning(request)
        time = float(request.timestep.max())
        if time != self._time:
            self._times, self._time = self._times + 1, time
        rested = self._times - self._known.get(conditioning.id, -1) > 1  # true for a conditioning without a call
        if not request.apart:
            self._known[conditioning.id] = self._times
        exact = request.exact or self._alone or (self.warm_up and rested)
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
        """Answer requests for forecast calls. The bands need not wait for each other."""
        for call, band in [waiting for waiting in self._waiting if waiting[0] in self._forecasts]:
            request, (timestep, forecast) = self._waiting.pop((call, band)), self._forecasts[call]
            if not torch.equal(request.timestep, timestep):
                self.abort(NotLocal("the patches are at different timesteps"))
                return
            self._settle(request, forecast.output(band))
        for call in [call for call in self._forecasts if call < min(self._calls)]:  # all bands are answered
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
            run=0 if self._alone or due.first.apart else self.run,
            overlap=self.overlap,
            residuals=residuals,
        )
        self._post(call, latents, parts, due.computed)
        self.exact_calls += 1

    def _post_band(self, due: _DueStep, request: _Request, conditioning: Conditioning) -> None:
        patch, rows = self.patching.band_size, self.rows[request.band]
        x, *companion = request.latents
        if padding := -len(rows) % patch:
            # ComfyUI pads an odd height circularly: behind the last row comes the image's first row, of band 0.
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
        """Post the call, and answer each request with its rows of the output; the first one also with the companion."""
        model = self.model

        def share(done: Future) -> None:
            if (error := done.exception()) is not None:
                if self.is_kept and isinstance(error, DeviceFull | RankLost):
                    self._lose(model, error)
                    return
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
        model.post(call)

    def _settle(self, request: _Request, answer: Latents | BaseException) -> None:
        with self._answering:
            still_open = [other for other in self._open if other is not request]
            if len(still_open) == len(self._open):  # answered already, by `abort`
                return
            self._open = still_open
        if isinstance(answer, BaseException):
            request.future.set_exception(answer)
        else:
            device = latents_of(request.call.x)[0].device
            request.future.set_result(like(request.call.x, tuple(to_device(part, device) for part in answer)))


def _side_by_side(bands: list[Residuals]) -> Residuals:
    """The bands' residuals joined. If blocks share a tensor in the bands, they share one here, so that it is sent once."""
    joined: dict[tuple[int, ...], torch.Tensor] = {}
    whole = {}
    for block in bands[0]:
        parts = [residuals[block] for residuals in bands]
        key = tuple(map(id, parts))
        if key not in joined:
            joined[key] = torch.cat(parts, dim=1)
        whole[block] = joined[key]
    return whole
