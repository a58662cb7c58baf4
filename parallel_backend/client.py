"""What the nodes call: a model that lives on a pool of ranks and answers `predict`.

A call is cut into micro-steps (batch entries over replicas, entries of an exact call one by one through the pipeline),
posted in order with a small window, and its outputs, shard by shard, are put together again.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from statistics import fmean

import torch

from . import messages as m
from .balance import balance
from .call import Assembly, Call, Conditioning, PostedStep, Residuals
from .checkpoint import Checkpoint
from .config import SEQUENCE_AXES, WIDGETS, Degrees, check_devices, check_model
from .deltas import Delta, Deltas
from .families.base import REFERENCE_POSITIONS, REFERENCES, TEXT_MASK
from .layout import SequenceCut, Span, split
from .pool import Poll, Pool, Progress, wait_for
from .step_cache import Forecast, StepCache

CONDITIONINGS_KEPT = 8


class RemoteTransformer:
    """A checkpoint, cut by `degrees`, on the ranks of `pool`. Thread-safe.

    `stage_split`: 'even' (block counts), 'auto' (measured block costs decide stages and patch shares) or a number of
    blocks for each stage, such as '10,9'. `only`, `compile`, `transfer_dtype`: see messages.Load.
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
        progress: Progress = lambda doing, fraction: None,
        only: tuple[str, ...] = (),
        compile: bool = False,
        transfer_dtype: str = "full",
    ):
        check_devices(degrees, pool.devices)
        family, config = checkpoint.family, checkpoint.config
        check_model(
            degrees,
            heads=family.heads(config),
            blocks=family.block_count(config),
            key_heads=family.key_heads(config),
            unsupported=family.unsupported,
        )
        self.pool, self.checkpoint, self.degrees, self.family = pool, checkpoint, degrees, family
        self._lock = threading.RLock()
        self._seq, self._ids, self._runs = itertools.count(1), itertools.count(1), itertools.count(1)
        self._conditionings: deque[Conditioning] = deque()
        self._window = degrees.pipe + 1
        self._waiting: list[deque[PostedStep]] = [deque() for _ in range(degrees.batch)]
        self._flying: list[dict[int, PostedStep]] = [{} for _ in range(degrees.batch)]
        self._shards_left: dict[int, int] = {}
        self._error: Exception | None = None
        self._loading = [0.0] * len(pool.devices)
        pool.take_over(self._on_output, self._on_loading, self._on_failure)
        if not pool.ready.done():
            progress(f"starting {len(pool.devices)} ranks", 0.0)
        wait_for(pool.ready, poll)
        progress("loading", 0.0)
        found = balance(pool, checkpoint, degrees, dtype, stage_split, poll)
        self.stage_blocks, self.patch_shares, self.stage_costs = found.stage_blocks, found.patch_shares, found.stage_costs
        self.cut = SequenceCut(self.patch_shares, degrees.ring * degrees.ulysses, degrees.naive)
        load = m.Load(
            str(checkpoint.path),
            dtype,
            degrees.sizes,
            degrees.patch_mode,
            self.patch_shares,
            self.stage_blocks,
            attention,
            only,
            compile,
            transfer_dtype,
        )

        def look() -> None:
            poll()
            progress("loading", fmean(self._loading))

        replies = wait_for(pool.ask(load, m.Loaded), look)
        self.weight_bytes = [reply.weight_bytes for reply in replies]
        progress(f"{sum(self.weight_bytes) / 1e9:.1f} GB of weights on {len(replies)} ranks", 1.0)
        self._deltas = Deltas(checkpoint, [reply.parameters for reply in replies], pool.send)
        self._adapting = threading.Lock()
        self._adapters: Hashable | None = None
        self.adapter_bytes = [0] * len(replies)

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
            replies = wait_for(self.pool.ask(m.AdaptersSent(next(self._runs)), m.Adapted), poll)
            self.adapter_bytes = [reply.adapter_bytes for reply in replies]
            self._adapters = name

    def retire(self) -> None:
        """Calls fail from now on: the ranks are about to free the weights, adapters, conditioning and K/V buffers."""
        self._on_failure(RuntimeError("Parallel DiT: the model has been unloaded from its ranks"))
        self._conditionings.clear()

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
        home: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Model output for the whole latent `x` [B, C, H, W] at `timestep` [B]; same shape and device as `x`.

        Exact, but in naive patch mode, and where the run's `cache` forecasts it. `home`: see `conditioning`. `meanwhile` is
        called once the call is on its way, before it is waited for: it may make other calls.
        """
        patching = self.family.patching
        grid = patching.grid(x.shape)
        conditioning = self.conditioning(grid, tensors, home)
        entry = None if cache is None else cache.call(conditioning.id, float(timestep.max()), may_forecast)
        if isinstance(entry, Forecast):
            return entry.output().to(x.device)
        call = self.call(patching.pack(x), timestep, conditioning, run=0, overlap=overlap, residuals=residuals)
        self.post(call)
        try:
            meanwhile()
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
        tokens = tokens or conditioning.stream.span
        assert x.shape[:2] == (conditioning.batch, len(conditioning.stream.images(tokens)))
        assert not (run and self.degrees.naive), "naive patches keep nothing from call to call"
        if not all(len(shard) for shard in self.cut.image(tokens)):
            degrees = " x ".join(f"{WIDGETS[axis]} {n}" for axis in SEQUENCE_AXES if (n := getattr(self.degrees, axis)) > 1)
            raise ValueError(
                f"{degrees} cuts this picture (or patch of it), which has only {len(tokens)} tokens: one for each rank is "
                "the least. Use a larger picture, fewer patches or smaller degrees."
            )
        return Call(x, timestep.float().cpu(), conditioning, tokens, with_text, run, stale, overlap, residuals or {})

    def conditioning(self, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], home: int = 0) -> Conditioning:
        """The ranks' own copy of these tensors, sent only if it is not there yet.

        A sampler passes the same values again at each step, in new tensors: they are compared, not identified.
        `home`: replica (counted on past the last one) whose turn it is; it and those behind it get the larger shares.
        ValueError if the model has no positions for so large a `grid`.
        """
        side = self.family.max_side(self.checkpoint.config)
        if side is not None and max(grid[-2:]) > side:
            rows, columns = (size * self.family.patching.side for size in grid[-2:])
            limit = side * self.family.patching.side
            raise ValueError(
                f"latent_image: {columns} x {rows} is too large for this model, whose positions end at {limit} x {limit} "
                "latent pixels. Use a smaller latent."
            )
        home %= self.degrees.batch
        with self._lock:
            self._check()
            for known in reversed(self._conditionings):
                if known.home == home and known.matches(grid, tensors):
                    return known
            names = [name for name in self.family.token_tensors if name in tensors]
            conditioning = Conditioning(
                next(self._ids),
                grid,
                self.family.stream(grid, tensors[REFERENCES].shape[1] if REFERENCES in tensors else 0),
                self.family.image_padding(grid) + (self.family.padded(tensors[names[0]].shape[1]) if names else 0),
                len(next(iter(tensors.values()))),
                {name: tensor.clone() for name, tensor in tensors.items()},  # the caller may write over its own
                home,
            )
            self._send_conditioning(conditioning)
            self._conditionings.append(conditioning)
            if len(self._conditionings) > CONDITIONINGS_KEPT:
                old = self._conditionings.popleft()
                self.pool.tell(m.DropConditioning(old.id))
            return conditioning

    def open_run(self, extrapolate: bool = True) -> int:
        """A number for a run, under which its calls keep their K/V buffers (see messages.OpenRun).

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

    def close_run(self, run: int, poll: Poll) -> list[m.RunStats]:
        """Drop the run's buffers; what each rank did since the last report, in rank order."""
        self._check()
        return wait_for(self.pool.ask(m.CloseRun(run), m.RunStats), poll)

    def begin_timeline(self) -> None:
        """A sampling run begins: `timeline` is about what the ranks do from now on."""
        self.pool.tell(m.BeginTimeline())

    def timeline(self, poll: Poll) -> list[m.Timeline]:
        """What each rank did when since the last `begin_timeline`, or since it was loaded, in rank order."""
        return wait_for(self.pool.ask(m.ReadTimeline(next(self._runs)), m.Timeline), poll)

    def discard_run(self, run: int) -> None:
        """Give the run up without waiting: what was sent (the window at most) still finishes on the ranks, unheard."""
        self.abandon(run)
        if self._error is None and self.pool.error is None:
            self.pool.tell(m.CloseRun(run))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def abandon(self, run: int) -> None:
        """Forget the run's calls: those not sent yet never will be, those under way finish and are dropped."""
        self._abandon(lambda call: call.run == run)

    def _abandon(self, forget: Callable[[Call], bool]) -> None:
        with self._lock:
            for waiting in self._waiting:
                kept = [step for step in waiting if not forget(step.assembly.call)]
                waiting.clear()
                waiting.extend(kept)

    def post(self, call: Call) -> None:
        """Queue the call's micro-steps; `call.future` gives tokens [B, n, c] on the CPU."""
        assembly = Assembly(call)
        with self._lock:
            if self._error is not None:
                call.future.set_exception(self._error)
                return
            whole = call.tokens == call.conditioning.stream.span
            for replica, entries in enumerate(call.conditioning.shares(self.degrees.batch)):
                # An exact call fills the pipeline with its batch entries: nothing else could overlap in it.
                parts = len(entries) if whole and self.degrees.pipe > 1 else min(1, len(entries))
                for part in split(entries, parts) if parts else ():
                    step = PostedStep(next(self._seq), assembly, part, part.shift(-entries.start))
                    assembly.missing += self.degrees.sequence
                    self._waiting[replica].append(step)
            for replica in range(self.degrees.batch):
                self._fill(replica)

    def _fill(self, replica: int) -> None:
        """Send waiting micro-steps while fewer than the window are under way.

        The window keeps every stage busy and one micro-step ahead, and no more: what is sent cannot be called back.
        """
        waiting, flying = self._waiting[replica], self._flying[replica]
        while waiting and len(flying) < self._window:
            step = waiting.popleft()
            flying[step.seq] = step
            self._shards_left[step.seq] = self.degrees.sequence
            self._send_step(replica, step)

    def _send_step(self, replica: int, step: PostedStep) -> None:
        call = step.assembly.call
        stream = call.conditioning.stream
        first = stream.images(call.tokens).start
        for stage in range(self.degrees.pipe):
            blocks = self._stage_residuals(stage, call.residuals)
            # A ControlNet with few blocks repeats its tensors: each is sent once.
            added = list({id(tensor): tensor for tensor in blocks.values()}.values())
            numbers = {id(tensor): number for number, tensor in enumerate(added)}
            for index, shard in enumerate(self.cut.image(call.tokens)):
                images = stream.images(shard).shift(-first).slice
                message = m.Step(
                    step.seq,
                    call.run,
                    call.conditioning.id,
                    call.tokens,
                    call.with_text,
                    call.stale,
                    call.overlap,
                    step.local,
                    call.timestep[step.entries.slice],
                    {block: numbers[id(tensor)] for block, tensor in blocks.items()},
                    tuple(tensor[step.entries.slice, images] for tensor in added),
                    call.x[step.entries.slice, images] if stage == 0 else None,
                )
                for rank in self.degrees.ranks(replica, stage, index):
                    self.pool.send(rank, message)

    def _stage_residuals(self, stage: int, residuals: Residuals) -> Residuals:
        """Those of the stage's own blocks."""
        if not residuals:
            return {}
        owned = self.family.owned(self.checkpoint.config, self.stage_blocks[stage])
        own = {f"{name}.{index}" for name in self.family.residuals.values() for index in owned[name]}
        return {block: tensor for block, tensor in residuals.items() if block in own}

    def _send_conditioning(self, conditioning: Conditioning) -> None:
        family, degrees = self.family, self.degrees
        text = self.cut.text(conditioning.text_tokens)
        for replica, entries in enumerate(conditioning.shares(degrees.batch)):
            for stage in range(degrees.pipe):
                for index in range(degrees.sequence):
                    tensors = {}
                    for name, tensor in conditioning.tensors.items():
                        everywhere = name in (*family.vector_tensors, TEXT_MASK, REFERENCE_POSITIONS)
                        if stage > 0 and not everywhere:
                            continue
                        whole = everywhere or name == REFERENCES or family.whole_latent
                        tensors[name] = tensor[entries.slice] if whole else tensor[entries.slice, text[index].slice]
                    message = m.PutConditioning(
                        conditioning.id,
                        conditioning.grid,
                        conditioning.stream.references,
                        conditioning.text_tokens,
                        len(entries),
                        tensors,
                    )
                    for rank in degrees.ranks(replica, stage, index):
                        self.pool.send(rank, message)

    def _on_output(self, output: m.Output) -> None:
        """On the pool's thread: put the part in its place, send what the window now allows, hand out a finished call."""
        at = self.degrees.coordinate(output.rank)
        with self._lock:
            step = self._flying[at.batch].get(output.seq)
            if step is None:  # from before this model was loaded: a cancelled run's last micro-steps
                return
            call = step.assembly.call
            images = call.conditioning.stream.images
            shard = images(self.cut.image(call.tokens)[self.degrees.sequence_index(at)])
            complete = step.assembly.put(step.entries, shard.shift(-images(call.tokens).start), output.value)
            self._shards_left[output.seq] -= 1
            if not self._shards_left[output.seq]:
                del self._shards_left[output.seq], self._flying[at.batch][output.seq]
                self._fill(at.batch)
        if complete:
            step.assembly.call.future.set_result(step.assembly.value)

    def _on_loading(self, loading: m.Loading) -> None:
        self._loading[loading.rank] = loading.fraction

    def _on_failure(self, error: Exception) -> None:
        """The ranks' model is this one no more, or the pool has failed: every call, waiting or to come, raises `error`."""
        with self._lock:
            self._error = error
            steps = [step for queue in (*self._waiting, *(f.values() for f in self._flying)) for step in queue]
            futures = {id(step.assembly.call.future): step.assembly.call.future for step in steps}
            self._waiting = [deque() for _ in range(self.degrees.batch)]
            self._flying = [{} for _ in range(self.degrees.batch)]
        for future in futures.values():
            future.set_exception(error)
