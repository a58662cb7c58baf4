"""What the nodes call: a model that lives on a pool of ranks and answers `predict`.

A call is cut into micro-steps (batch entries over replicas, entries of an exact call one by one through the pipeline),
posted in order with a small window, and its outputs, shard by shard, are put together again (see micro_step_queue.py).
"""

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from statistics import fmean

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.fingerprint import fingerprint
from parallel_backend.client.placement.balance import balance
from parallel_backend.client.placement.memory_check import MemoryCheck, devices_for
from parallel_backend.core.degrees import SEQUENCE_AXES, WIDGETS, Degrees
from parallel_backend.core.devices import on_ray
from parallel_backend.core.finite import all_finite
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.core.validate import check_devices
from parallel_backend.processes.pool import LoadProgress, Poll, Pool, RankError, again, wait_for
from parallel_backend.wire import messages as m

from .call import Call, Conditioning, PostedStep, Residuals, fail
from .conditioning_cache import ConditioningCache
from .lora import Delta, Deltas
from .memory_guard import MemoryGuard
from .micro_step_queue import MicroSteps
from .not_finite import NotFiniteError, check_latent, explanation
from .scatter import Scatter
from .step_cache import Forecast, StepCache


class RemoteTransformer:
    """A checkpoint, cut by `degrees`, on the ranks of `pool`. Thread-safe.

    `stage_split`: 'even' (block counts), 'auto' (measured block costs decide stages and patch shares) or a number of
    blocks for each stage, such as '10,9'. `only`, `compile`, `transfer_dtype`: see loading.Load.
    `stage_blocks`, `patch_shares` and `stage_costs` say what came of it. `progress` is called with `poll`, on the same
    thread.
    Raises ValueError (naming the widget) where the model cannot be cut so, RankError when a rank fails.
    """

    def __init__(
        self,
        pool: Pool,
        checkpoint: Checkpoint,
        degrees: Degrees,
        dtype: str,
        attention: str,
        poll: Poll,
        stage_split: str = "even",
        progress: LoadProgress = lambda doing, fraction: None,
        only: tuple[str, ...] = (),
        compile: bool = False,
        transfer_dtype: str = "full",
    ):
        check_devices(degrees, pool.devices)
        family = checkpoint.family
        checkpoint.check_degrees(degrees)
        self.pool, self.checkpoint, self.degrees, self.family, self.dtype = pool, checkpoint, degrees, family, dtype
        self._lock = threading.RLock()
        self._runs = itertools.count(1)
        self._conditionings: ConditioningCache | None = None
        patch = family.patching.frames * family.patching.side**2
        self._micro_steps = MicroSteps(degrees, pool.newest_step, patch, self._send_step, self._rows)
        self._error: Exception | None = None
        self._memory: MemoryGuard | None = None
        self._loading = [0.0] * len(pool.devices)
        pool.take_over(self._on_output, self._on_loading, self._on_failure)
        if not pool.ready.done():
            progress(f"starting {len(pool.devices)} ranks", 0.0)
        wait_for(pool.ready, poll)
        progress("loading", 0.0)
        found = balance(pool, checkpoint, degrees, dtype, stage_split, poll)
        self.stage_blocks, self.patch_shares, self.stage_costs = found.stage_blocks, found.patch_shares, found.stage_costs
        memory_check = MemoryCheck(checkpoint, degrees, self.stage_blocks, dtype, pool.devices, devices_for(pool.devices))
        self._memory = MemoryGuard(pool, memory_check, family)
        if not only:
            self._memory.check_weights(poll)
        self.cut = SequenceCut(self.patch_shares, degrees.ring * degrees.ulysses, degrees.naive)
        self._scatter = Scatter(checkpoint, degrees, self.stage_blocks, self.cut, pool)
        self._conditionings = ConditioningCache(checkpoint, pool, self._scatter)
        load = m.Load(
            path=str(checkpoint.path),
            dtype=dtype,
            degrees=degrees.sizes,
            patch_mode=degrees.patch_mode,
            patch_shares=self.patch_shares,
            stage_blocks=self.stage_blocks,
            attention=attention,
            only=only,
            compile=compile,
            transfer_dtype=transfer_dtype,
            fingerprint=fingerprint(checkpoint) if any(map(on_ray, pool.devices)) else "",
        )
        replies = self._load(load, poll, progress)
        self.weight_bytes = [reply.weight_bytes for reply in replies]
        held = f"{sum(self.weight_bytes) / 1e9:.1f} GB of weights on {len(replies)} ranks"
        progress(", ".join((held, *pool.notes)), 1.0)
        self._deltas = Deltas(checkpoint, [reply.parameters for reply in replies], pool.send)
        self._adapting = threading.Lock()
        self._adapters: Hashable | None = None
        self.adapter_bytes = [0] * len(replies)

    def _load(self, load: m.Load, poll: Poll, progress: LoadProgress) -> list[m.Loaded]:
        def look() -> None:
            poll()
            progress("loading", fmean(self._loading))

        try:
            return wait_for(self.pool.ask(load, m.Loaded), look)
        except RankError as error:
            raise self._memory.explained(error) from None

    def adapt(self, name: Hashable | None, deltas: Iterable[Delta], poll: Poll) -> None:
        """Compute with the checkpoint's weights and these added, in place of what was added before; for no call under way.

        `name` stands for the deltas: under the name of last time nothing is sent, and `deltas` is not looked at. None: as
        loaded. Waits until every rank has its part, whose size is then in `adapter_bytes`. ValueError for a delta that
        does not fit the checkpoint.
        """
        with self._adapting:
            self._check()
            if name == self._adapters:
                return
            self._adapters = object()  # equal to no name, until the ranks say that all is in place
            self._deltas.replace(deltas, poll)
            replies = wait_for(self.pool.ask(m.AdaptersSent(), m.Adapted), poll)
            self.adapter_bytes = [reply.adapter_bytes for reply in replies]
            self._adapters = name

    def retire(self) -> None:
        """Calls fail from now on: the ranks are about to free the weights, adapters, conditioning and K/V buffers."""
        self._on_failure(RuntimeError("Parallel DiT: the model has been unloaded from its ranks"))

    def bytes_on(self, device: str) -> int:
        """Of weights and adapters that the ranks on this device hold between them."""
        held = zip(self.pool.devices, self.weight_bytes, self.adapter_bytes, strict=True)
        return sum(weights + adapters for name, weights, adapters in held if name == device)

    def predict(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        tensors: dict[str, torch.Tensor],
        poll: Poll,
        overlap: bool = True,
        residuals: Residuals | None = None,
        cache: StepCache | None = None,
        may_forecast: bool = True,
        first_replica: int = 0,
        on_posted: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Model output for the whole latent `x` [B, C, H, W] at `timestep` [B]; same shape and device as `x`.

        Exact, but in naive patch mode, and where the run's `cache` forecasts it. `first_replica`: see `conditioning`.
        `on_posted` is called once the call is on its way, before it is waited for: it may make other calls.
        """
        patching = self.family.patching
        grid = patching.grid(x.shape)
        conditioning = self.conditioning(grid, tensors, first_replica)
        entry = None if cache is None else cache.call(conditioning.id, float(timestep.max()), may_forecast)
        if isinstance(entry, Forecast):
            return entry.output().to(x.device)
        self._memory.admit(conditioning, poll)
        call = self.call(patching.pack(x), timestep, conditioning, run=0, overlap=overlap, residuals=residuals)
        self.post(call)
        try:
            on_posted()
            tokens = wait_for(call.future, poll)
        except BaseException:
            self._abandon(lambda other: other is call)
            raise
        output = patching.unpack(tokens, tuple(x.shape))
        if entry is not None:
            entry.outputs[0] = output
        return output.to(x.device)

    def call(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        run: int,
        tokens: Span | None = None,
        with_text: bool = True,
        stale: bool = False,
        overlap: bool = True,
        residuals: Residuals | None = None,
    ) -> Call:
        tokens = tokens or conditioning.token_order.span
        assert x.shape[:2] == (conditioning.batch, len(conditioning.token_order.images(tokens)))
        assert not (run and self.degrees.naive), "naive patches keep nothing from call to call"
        check_latent(x, timestep)
        self._memory.check(run, conditioning)
        if not all(len(shard) for shard in self.cut.image(tokens)):
            degrees = " x ".join(f"{WIDGETS[axis]} {n}" for axis in SEQUENCE_AXES if (n := getattr(self.degrees, axis)) > 1)
            raise ValueError(
                f"{degrees} cuts this picture (or patch of it), which has only {len(tokens)} tokens: one for each rank is "
                "the least. Use a larger picture, fewer patches or smaller degrees."
            )
        return Call(x, timestep.float().cpu(), conditioning, tokens, with_text, run, stale, bool(overlap), residuals or {})

    def conditioning(self, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], first_replica: int = 0) -> Conditioning:
        """The ranks' own copy of these tensors, sent only if it is not there yet (see ConditioningCache).

        `first_replica`: first replica to receive entries, modulo the replica count. The first ones get the larger shares.
        ValueError if the model has no positions for so large a `grid`.
        """
        self._conditionings.check_size(grid)
        with self._lock:
            self._check()
            return self._conditionings.find(grid, tensors, first_replica % self.degrees.batch)

    def open_run(self, extrapolate: bool = True) -> int:
        """A number for a run, under which its calls keep their K/V buffers (see sampling.OpenRun).

        ValueError for a family without such keys and values.
        """
        if "pipe" in self.family.unsupported:
            raise ValueError(
                f"model: {self.family.name} has no attention that could use old keys, so it cannot be sampled in bands. "
                "Remove PipeFusion."
            )
        with self._lock:
            self._check()
            run = next(self._runs)
            self.pool.tell(m.OpenRun(run, extrapolate))
            return run

    def watch_memory(self, run: int, bands: int, extrapolate: bool, poll: Poll) -> None:
        """Ask the ranks once what memory they have; the run's first call for each conditioning is then refused with a
        ValueError if what it keeps and computes cannot fit. `bands`, `extrapolate`: of the run.
        """
        self._memory.watch(run, bands, extrapolate, poll)

    def close_run(self, run: int, poll: Poll) -> list[m.RunStats]:
        """Drop the run's buffers; what each rank did since the last report, in rank order."""
        self._memory.forget(run)
        self._check()
        return wait_for(self.pool.ask(m.CloseRun(run), m.RunStats), poll)

    def begin_timeline(self) -> None:
        """A sampling run begins: `timeline` is about what the ranks do from now on, and memory is looked at anew."""
        self._memory.refresh()
        self.pool.tell(m.BeginTimeline())

    def timeline(self, poll: Poll) -> list[m.Timeline]:
        """What each rank did when since the last `begin_timeline`, or since it was loaded, in rank order."""
        found = wait_for(self.pool.ask(m.ReadTimeline(), m.Timeline), poll)
        for each in found:
            spans = len(each.times)
            if (each.times.shape, each.labels.shape) != ((spans, 2), (spans, 5)) or not each.times.isfinite().all():
                raise self.pool.refuse(each.rank, f"a timeline of {list(each.times.shape)} and {list(each.labels.shape)}")
        return found

    def discard_run(self, run: int) -> None:
        """Give the run up without waiting: what was sent (the window at most) still finishes on the ranks, unheard."""
        self.abandon(run)
        self._memory.forget(run)
        if self._error is None and self.pool.error is None:
            self.pool.tell(m.CloseRun(run))

    def _check(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def abandon(self, run: int) -> None:
        """Forget the run's calls: those not sent yet never will be, those under way finish and are dropped."""
        self._abandon(lambda call: call.run == run)

    def _abandon(self, which: Callable[[Call], bool]) -> None:
        with self._lock:
            self._micro_steps.forget(which)

    def post(self, call: Call) -> None:
        """Queue the call's micro-steps; `call.future` gives tokens [B, n, c] on the CPU."""
        with self._lock:
            if self._error is None:
                self._micro_steps.post(call)
            else:
                fail(call.future, self._error)

    def _rows(self, call: Call, index: int) -> Span:
        """Of the call's output, those that the sequence rank of this number has."""
        images = call.conditioning.token_order.images
        return images(self.cut.image(call.tokens)[index]).shift(-images(call.tokens).start)

    def _send_step(self, replica: int, step: PostedStep) -> None:
        self.pool.newest_step = max(self.pool.newest_step, step.seq)
        self._scatter.step(replica, step)

    def _on_output(self, output: m.Output) -> None:
        """On a thread of the pool: hand out a call that this completes. BadMessage: see MicroSteps.accept."""
        finite = all_finite(output.value)
        with self._lock:
            found = self._micro_steps.accept(output, finite)
        if found is None:
            return
        assembly, complete, nonfinite = found
        if nonfinite:
            self._find_cause(assembly.call, output.seq, assembly.first_seq)
        elif complete and not assembly.nonfinite:
            assembly.call.future.set_result(assembly.value)

    def _find_cause(self, call: Call, seq: int, first_seq: int) -> None:
        """Micro-step `seq` of the call gave values that are not finite: fail it with what the ranks know of them.

        They may have begun in an earlier call of the same run, in K/V that this one read; in a call outside of a run they
        began in its own micro-steps, which are numbered from `first_seq` on.
        """

        def end(asked: Future) -> None:
            error = asked.exception()
            if error is None:
                controlled, adapted = bool(call.residuals), self._adapters is not None
                text = explanation(asked.result(), seq, self.degrees, self.pool.devices, self.dtype, adapted, controlled)
                error = NotFiniteError(text)
            fail(call.future, error)

        try:
            question = m.FindNotFinite(call.run, 0 if call.run else first_seq)
            self.pool.ask(question, m.NotFiniteFound).add_done_callback(end)
        except RankError as error:
            fail(call.future, error)

    def _on_loading(self, loading: m.Loading) -> None:
        self._loading[loading.rank] = loading.fraction

    def _on_failure(self, error: Exception) -> None:
        """The ranks' model is this one no more, or the pool has failed: every call, waiting or to come, raises `error`."""
        if self._memory is not None:
            error = self._memory.explained(error)
        with self._lock:
            self._error = error
            if self._conditionings is not None:
                self._conditionings.clear()
            calls = self._micro_steps.end()
        for call in calls:
            fail(call.future, error)
