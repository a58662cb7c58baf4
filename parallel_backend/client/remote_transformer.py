"""What the nodes call: a model that lives on a pool of ranks and answers `predict`.

A call is cut into micro-steps (batch entries over replicas, entries of an exact call one by one through the pipeline),
posted in order with a small window, and its outputs, shard by shard, are put together again (see micro_step_queue.py).
"""

import math
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from statistics import fmean

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.fingerprint import fingerprint
from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.degrees import SEQUENCE_AXES, WIDGETS, Degrees
from parallel_backend.core.devices import on_ray
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.core.validate import check_devices
from parallel_backend.families.base.patching import Latents, latents_of, like
from parallel_backend.placement.balance import even_stages
from parallel_backend.placement.memory_check import SHARED, MemoryCheck, devices_for
from parallel_backend.placement.memory_model import Request
from parallel_backend.placement.pipeline_model import StageCost
from parallel_backend.placement.residency import ALLOWED, Offload, shared_bytes
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import LoadProgress, Poll, Pool, RankError, wait_for
from parallel_backend.wire import messages as m

from .call import Call, Conditioning, Residuals
from .conditioning_cache import ConditioningCache
from .giving_way import give_way, hand_over
from .lora import Adaptation, Delta
from .measured_balance import balance
from .memory_guard import MakeRoom, MemoryGuard, no_room
from .not_finite import CauseSearch, check_latent
from .posting import Posting
from .resident_weights import ResidentWeights
from .runs import Runs
from .scatter import Scatter
from .step_cache import Forecast, StepCache


class RemoteTransformer:
    """A checkpoint, cut by `degrees`, on the ranks of `pool`. Thread-safe.

    `stage_split`: 'even' (block counts), 'auto' (measured block costs decide stages and patch shares) or a number of
    blocks for each stage, such as '10,9'. `only`, `compile`, `transfer_dtype`, `cuda_graphs`: see loading.Load.
    `stage_blocks`, `patch_shares` and `stage_costs` say what came of it. `progress` is called with `poll`, on the same
    thread. `make_room`: asked for memory on the ranks' GPUs, before loading and before runs. `expected`: the run that the
    model is loaded for; the cut goes by it, and stays for runs of other sizes. `keep_others`: other models stay on the
    ranks. `offload`: whether weights may be streamed.
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
        make_room: MakeRoom = no_room,
        expected: Request | None = None,
        keep_others: bool = False,
        offload: Offload = ALLOWED,
        cuda_graphs: bool = False,
    ):
        check_devices(degrees, pool.devices)
        family = checkpoint.family
        checkpoint.check_degrees(degrees)
        self.pool, self.checkpoint, self.degrees, self.family, self.dtype = pool, checkpoint, degrees, family, dtype
        self._memory: MemoryGuard | None = None
        self._loading = [0.0] * len(pool.devices)
        self._ranks = ranks = ModelRanks(pool, keep_others)
        self._causes = CauseSearch(ranks, degrees, dtype, lambda: self._adaptation.present)
        self._posting = Posting(ranks, degrees, family.patching.frames * family.patching.side**2, self._causes.fail)
        ranks.listen(self._posting.on_output, self._on_loading, self._on_failure)
        if not pool.ready.done():
            progress(f"starting {len(pool.devices)} ranks", 0.0)
        wait_for(pool.ready, poll)
        progress("loading", 0.0)
        even = even_stages(family.blocks.total(checkpoint.config), degrees.pipe)
        there = pool.devices, devices_for(pool.devices)
        memory_check = MemoryCheck(checkpoint, degrees, even, dtype, *there, offload, transfer_dtype)
        self._memory = MemoryGuard(ranks, memory_check, family, make_room, self._posting.lock)
        requests = () if expected is None else (expected,)
        if not only:
            self._memory.make_room_for(requests, poll)
        rates = self._memory.copy_rates
        self._balance = balance(pool, checkpoint, degrees, dtype, stage_split, poll, expected, rates)
        self.stage_blocks, self.patch_shares = self._balance.stage_blocks, self._balance.patch_shares
        memory_check.spans = self.stage_blocks
        if not only:
            self._memory.check_weights(requests, poll)
        self.cut = SequenceCut(self.patch_shares, degrees.ring * degrees.ulysses, degrees.naive)
        scatter = Scatter(checkpoint, degrees, self.stage_blocks, self.cut, ranks, self._posting.shared)
        self._posting.start(self.cut, scatter, ConditioningCache(checkpoint, ranks, scatter), self.resident.wake)
        self._runs = Runs(ranks, self._posting, self._memory, family)
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
            file_state="" if any(map(on_ray, pool.devices)) else checkpoint.file_state,
            resident=self.resident.for_loading,
            cuda_graphs=cuda_graphs,
        )
        replies = self._load(load, poll, progress)
        self.resident.loaded(replies)
        held = f"{sum(self.weight_bytes) / 1e9:.1f} GB of weights on {len(replies)} ranks"
        streamed = memory_check.said_of_streaming(self.resident.limits)
        progress(", ".join(filter(None, (held, streamed, *pool.notes))), 1.0)
        self._adaptation = Adaptation(ranks, checkpoint, replies)

    @property
    def resident(self) -> ResidentWeights:
        """Where its weights are."""
        return self._memory.resident

    @property
    def weight_bytes(self) -> list[int]:
        """By rank, of weights on its device."""
        return list(self.resident.device_bytes)

    @property
    def adapter_bytes(self) -> list[int]:
        """By rank, of what `adapt` added."""
        return self._adaptation.bytes

    def _load(self, load: m.Load, poll: Poll, progress: LoadProgress) -> list[m.Loaded]:
        def look() -> None:
            poll()
            progress("loading", fmean(self._loading))

        try:
            return wait_for(self._ranks.ask(load, m.Loaded), look)
        except RankError as error:
            raise self._memory.explained(error) from None

    def adapt(self, name: Hashable | None, deltas: Iterable[Delta], poll: Poll, strengths: tuple[float, ...] = ()) -> None:
        """Compute with the checkpoint's weights and these added, in place of what was added before; for no call under way.

        `name` stands for the deltas: under the name of last time none is sent, and `deltas` is not looked at. None: as
        loaded. `strengths`: of the deltas' groups 1, 2, ...; other ones cost a message. Waits until every rank has its
        part, whose size is then in `adapter_bytes`. ValueError for a delta that does not fit the checkpoint.
        """
        if not self._adaptation.has(name, strengths):
            self._memory.wake(poll)  # what is added is put beside weights
        self._adaptation.replace(name, deltas, strengths, self._posting.check, poll)

    def stage_costs(self, grid: tuple[int, ...]) -> tuple[StageCost, ...] | None:
        """By stage, for a picture with these tokens along its axes; None where nothing was measured."""
        costs = self._balance.costs(math.prod(grid) / self.degrees.sequence)
        if costs is None:
            return None
        copies = [0.0] * len(costs)
        for rank, seconds in enumerate(self._memory.copy_seconds()):
            stage = self.degrees.coordinate(rank).pipe
            copies[stage] = max(copies[stage], seconds)
        return tuple(replace(cost, copies=seconds) for cost, seconds in zip(costs, copies, strict=True))

    @property
    def on_ranks(self) -> bool:
        """Whether it is still there: no other model has been loaded in its place, and no rank has failed."""
        return self._posting.alive and self.pool.error is None  # which is there before the calls hear of it

    def unload(self) -> Future:
        """Calls fail from now on, and the ranks free weights, adapters, conditioning and K/V buffers. The future ends when
        they have; micro-steps under way come first. RankError where the pool has failed."""
        self._on_failure(RuntimeError("Parallel DiT: the model has been unloaded from its ranks"))
        self._ranks.leave()
        return self._ranks.ask(m.Unload(), m.Unloaded)

    def bytes_on(self, device: str) -> int:
        """Of weights and adapters that the ranks on this device hold there between them."""
        return self._sum_on(device, self.resident.device_bytes)

    def wanted_on(self, device: str) -> int:
        """As `bytes_on`, if nobody else needs the room."""
        return self._sum_on(device, self.resident.wanted)

    def _sum_on(self, device: str, weights: tuple[int, ...]) -> int:
        held = zip(self.pool.devices, weights, self.adapter_bytes, strict=True)
        return sum(weight + adapters for name, weight, adapters in held if name == device)

    @property
    def is_parked(self) -> bool:
        """All of its weights are in host memory."""
        return not any(self.resident.expected())

    @property
    def host_lacks(self) -> int:
        """Bytes of weights that have no copy in host memory yet, and need room there when they leave their devices."""
        sizes = {rank: one.total for rank, one in enumerate(self.resident.weights)}
        whole = shared_bytes(self.degrees, sizes) if SHARED else sum(sizes.values())
        return max(0, whole - sum(self.resident.host_bytes))

    def make_way(self, device: str, nbytes: int, working: bool) -> int | None:
        """The ranks on `device` hand over so many bytes of it to other models on them, see giving_way.hand_over. Bytes that
        come free; None where weights have no other place.
        """
        own = [rank for rank, name in enumerate(self.pool.devices) if name == device]
        if not all(self._memory.has_host[rank] for rank in own):
            return None
        freed = hand_over(self.resident, own, nbytes, not self._memory.memory_check.offload.streams, working)
        self._memory.gave_way()
        return freed

    def give_way(self, device: str, nbytes: float, poll: Poll) -> int:
        """The ranks on `device` hand over so many bytes of its memory, see giving_way.give_way. Bytes that came free.

        What adapters add stays in the middle of a run or of a call, whose further micro-steps would be without it: they
        `adapt` once.
        """
        adaptation = None if self._memory.in_run or self._posting.busy else self._adaptation
        freed = give_way(self._ranks, self.resident, adaptation, device, nbytes, poll)
        self._memory.gave_way()
        return freed

    def predict(
        self,
        x: torch.Tensor | Latents,
        timestep: torch.Tensor,
        tensors: dict[str, torch.Tensor],
        poll: Poll,
        overlap: bool = True,
        residuals: Residuals | None = None,
        cache: StepCache | None = None,
        may_forecast: bool = True,
        first_replica: int = 0,
        on_posted: Callable[[], None] = lambda: None,
        changes: BlockChanges = UNCHANGED,
    ) -> torch.Tensor | Latents:
        """Model output for the whole latent `x` [B, C, H, W] at `timestep` [B]; same shape and device as `x`. With a latent
        beside the picture's `x` and the output are both.

        Exact, but in naive patch mode, and where the run's `cache` forecasts it. `first_replica`, `changes`: see
        `conditioning`.
        `on_posted` is called once the call is on its way, before it is waited for: it may make other calls.
        """
        latents, patching = latents_of(x), self.family.patching
        shapes = [tuple(latent.shape) for latent in latents]
        companion_tokens = patching.companion_tokens(shapes)
        conditioning = self.conditioning(
            patching.grid(shapes[0]), tensors, first_replica, companion_tokens=companion_tokens, changes=changes
        )

        def answer(outputs: Latents) -> torch.Tensor | Latents:
            return like(x, tuple(output.to(latents[0].device, non_blocking=True) for output in outputs))

        timestep = timestep.cpu()  # once, as the latents: all that looks at them looks here
        entry = None if cache is None else cache.call(conditioning.id, float(timestep.max()), may_forecast)
        if isinstance(entry, Forecast):
            return answer(entry.output())
        self._memory.admit(conditioning, poll, _timed(timestep))
        tokens = patching.pack_all(tuple(latent.cpu() for latent in latents))
        call = self.call(tokens, timestep, conditioning, run=0, overlap=overlap, residuals=residuals)
        self.post(call)
        try:
            on_posted()
            tokens = wait_for(call.future, poll)
        except BaseException:
            self._posting.abandon(lambda other: other is call)
            raise
        outputs = patching.unpack_all(tokens, shapes)
        if entry is not None:
            entry.outputs[0] = outputs
        return answer(outputs)

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
        """A call to `post`, checked. `x` [B, n + a, c]: the picture's tokens among `tokens` (None: all), with the text those
        of the companion latent too. Fields as of Call. `x` and `timestep` are on the CPU, where they are looked at and cut.

        ValueError for values that are not finite, for memory that cannot hold what the run keeps (see `watch_memory`), and
        for fewer tokens than sequence ranks.
        """
        tokens = tokens or conditioning.token_order.span
        companion_tokens = conditioning.companion_tokens if with_text else 0
        assert x.shape[:2] == (conditioning.batch, len(conditioning.token_order.images(tokens)) + companion_tokens)
        assert not (run and self.degrees.naive), "naive patches keep nothing from call to call"
        check_latent(x, timestep)
        self._memory.check(run, conditioning, _timed(timestep))
        if not all(len(shard) for shard in self.cut.image(tokens)):
            degrees = " x ".join(f"{WIDGETS[axis]} {n}" for axis in SEQUENCE_AXES if (n := getattr(self.degrees, axis)) > 1)
            raise ValueError(
                f"{degrees} cuts this picture (or patch of it), which has only {len(tokens)} tokens: one for each rank is "
                "the least. Use a larger picture, fewer patches or smaller degrees."
            )
        return Call(x, timestep.float(), conditioning, tokens, with_text, run, stale, bool(overlap), residuals or {})

    def conditioning(
        self,
        grid: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
        first_replica: int = 0,
        along: str = "rows",
        companion_tokens: int = 0,
        changes: BlockChanges = UNCHANGED,
    ) -> Conditioning:
        """The ranks' own copy of these tensors, sent only if it is not there yet (see ConditioningCache).

        `companion_tokens`: tokens of the companion latent. `changes`: what the calls change inside the blocks.
        `first_replica`: first replica to receive entries, modulo the replica count. The first ones get the larger shares.
        `along`: axis by which its calls' tokens are ordered first (Patching.along).
        ValueError if the model has no positions for so large a `grid`.
        """
        return self._posting.conditioning(grid, tensors, first_replica, along, companion_tokens, changes)

    def open_run(self, extrapolate: bool = True) -> int:
        """A number for a run, under which its calls keep their K/V buffers. See Runs.open, also for errors."""
        return self._runs.open(extrapolate)

    def watch_memory(self, run: int, bands: int, extrapolate: bool, poll: Poll) -> None:
        """Ask the ranks once what memory they have. The run's first call for each conditioning is then refused with a
        ValueError if what it keeps and computes cannot fit. `bands`, `extrapolate`: of the run.
        """
        self._memory.watch(run, bands, extrapolate, poll)

    def close_run(self, run: int, poll: Poll) -> list[m.RunStats]:
        """Drop the run's buffers. What each rank did since the last report, in rank order."""
        return self._runs.close(run, poll)

    def abandon(self, run: int) -> None:
        """Forget the run's calls: those not sent yet never will be, those under way finish and are dropped."""
        self._runs.abandon(run)

    def discard_run(self, run: int) -> None:
        """Give the run up without waiting, see Runs.discard."""
        self._runs.discard(run)

    def begin_timeline(self) -> None:
        """A sampling run begins: `timeline` is about what the ranks do from now on, and memory is looked at anew."""
        self._runs.begin_timeline()

    def timeline(self, poll: Poll) -> list[m.Timeline]:
        """What each rank did when since the last `begin_timeline`, or since it was loaded, in rank order."""
        return self._runs.timeline(poll)

    def post(self, call: Call) -> None:
        """Queue the call's micro-steps; `call.future` gives tokens [B, n + a, c] on the CPU."""
        self._posting.post(call)

    def _on_loading(self, loading: m.Loading) -> None:
        self._loading[loading.rank] = loading.fraction

    def _on_failure(self, error: Exception) -> None:
        """The ranks' model is this one no more, or the pool has failed: every call, waiting or to come, raises `error`."""
        self._posting.end(error if self._memory is None else self._memory.explained(error))


def _timed(timestep: torch.Tensor) -> bool:
    """Tokens have times of their own: timesteps [B, T], or more axes."""
    return timestep.ndim > 1 and timestep.shape[1] > 1
