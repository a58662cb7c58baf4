"""A model on the ranks of a pool, as the nodes use it.

A call is cut into micro-steps: batch entries over replicas, and entries of an exact call one by one through the pipeline.
They are posted in order, a small window at a time, and the parts of their outputs are joined (posting.py).
"""

import itertools
import math
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from dataclasses import replace

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.device_copies import to_device
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.calls.patching import Latents, latents_of, like
from parallel_backend.placement.balance import Balance
from parallel_backend.placement.memory_check import SHARED
from parallel_backend.placement.pipeline_model import StageCost
from parallel_backend.placement.residency import shared_bytes
from parallel_backend.processes.pool import DeviceFull, Poll, wait_for
from parallel_backend.wire import messages as m

from .call import Conditioning, ModelCall, PostedCall, StartNext, TokenLayout, different, has_token_times
from .lora import Adaptation, Delta
from .memory_guard import MemoryGuard
from .not_finite import check_latent
from .posting import Posting
from .resident_weights import ResidentWeights
from .step_cache import Forecast, StepCache


class RemoteTransformer:
    """A checkpoint on the ranks of a pool, cut by the degrees of `setup`. Created by loading.load_model. Thread-safe.
    `balance`: the blocks of each stage, and each patch rank's share of the image."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        balance: Balance,
        memory: MemoryGuard,
        posting: Posting,
        adaptation: Adaptation,
    ):
        self.checkpoint, self.setup, self.built, self.degrees = checkpoint, setup, checkpoint.built, setup.degrees
        self.balance, self._memory, self._posting, self._adaptation = balance, memory, posting, adaptation
        self._ranks, self.pool = memory.ranks, memory.ranks.pool
        self._runs = itertools.count(1)
        self._ranks.listen(posting.on_output, self._on_failure)

    @property
    def resident(self) -> ResidentWeights:
        """Where the model's weights are."""
        return self._memory.resident

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of weights on each rank's device."""
        return list(self.resident.device_bytes)

    @property
    def streamed_bytes(self) -> list[int]:
        """For each rank, bytes of weights that it copies to its device in each step, or that another model has displaced."""
        held = zip(self.resident.weights, self.weight_bytes, strict=True)
        return [max(0, weights.total - on_device) for weights, on_device in held]

    @property
    def answered(self) -> int:
        """Number of calls that the ranks have answered since the model was loaded."""
        return self._posting.answered

    @property
    def adapter_bytes(self) -> list[int]:
        """Bytes that `adapt` added on each rank."""
        return self._adaptation.bytes

    def adapt(self, name: Hashable | None, deltas: Iterable[Delta], poll: Poll, strengths: tuple[float, ...] = ()) -> None:
        """Add `deltas` to the checkpoint's weights, in place of earlier deltas. No call may be in progress.

        `name`: equal deltas have equal names. If the name is that of the last time, `deltas` is not read. None: no deltas.
        `strengths`: of the deltas' groups 1, 2, ...; changing only these is cheap. If a device has no room, weights move to
        host memory (adapter_room.py). Returns when every rank has its part, with its size in `adapter_bytes`.
        """
        if (name, strengths) == self._adaptation.in_place:
            self._posting.check()
            return
        self._memory.wake(poll)  # deltas need the weights on the devices
        room = self._memory.adapter_room(poll)
        self._adaptation.replace(name, deltas, strengths, self._posting.check, poll, room.take)
        self._memory.adapted()

    def stage_costs(self, grid: tuple[int, ...]) -> tuple[StageCost, ...] | None:
        """Return the costs of each stage for an image with `grid` tokens along its axes. None: the blocks were not timed."""
        costs = self.balance.costs(math.prod(grid) / self.degrees.sequence)
        if costs is None:
            return None
        copies = [0.0] * len(costs)
        for rank, seconds in enumerate(self._memory.copy_seconds()):
            stage = self.degrees.coordinate(rank).pipe
            copies[stage] = max(copies[stage], seconds)
        return tuple(replace(cost, copies=seconds) for cost, seconds in zip(costs, copies, strict=True))

    @property
    def on_ranks(self) -> bool:
        """Whether the model is still on the ranks: no other model has replaced it, and no rank has failed."""
        # The pool has its error before `_on_failure` is called.
        return self._posting.error is None and self.pool.error is None

    def unload(self) -> Future:
        """Fail all calls from now on. The ranks finish micro-steps in progress and free the model's memory; then the future
        ends. Raises RankError if the pool has failed."""
        self._on_failure(RuntimeError("Parallel DiT: the model has been unloaded from its ranks"))
        self._ranks.leave()
        return self._ranks.ask(m.Unload(), m.Unloaded)

    def bytes_on(self, device: str) -> int:
        """Return the bytes of weights and adapters on `device`, of all ranks that share it."""
        return self._sum_on(device, self.resident.device_bytes)

    def wanted_on(self, device: str) -> int:
        """Like `bytes_on`, but as if no other model needed the memory."""
        return self._sum_on(device, self.resident.wanted)

    def _sum_on(self, device: str, weights: tuple[int, ...]) -> int:
        held = zip(self.pool.devices, weights, self.adapter_bytes, strict=True)
        return sum(weight + adapters for name, weight, adapters in held if name == device)

    @property
    def is_parked(self) -> bool:
        """Whether all of the model's weights are in host memory."""
        return not any(self.resident.expected())

    @property
    def host_lacks(self) -> int:
        """Bytes of weights that have no copy in host memory, and would need one to leave their devices."""
        sizes = {rank: one.total for rank, one in enumerate(self.resident.weights)}
        whole = shared_bytes(self.degrees, sizes) if SHARED else sum(sizes.values())
        return max(0, whole - sum(self.resident.host_bytes))

    def make_way(self, device: str, nbytes: float, working: bool) -> int | None:
        """Free `nbytes` of `device`, see ResidentWeights.give_way. Returns the bytes that become free. None: weights cannot
        be moved to host memory.

        If the weights are not enough, a model that is not `working` gives up its adapters too; `adapt` sends them again.
        """
        ranks = [rank for rank, name in enumerate(self.pool.devices) if name == device]
        if not all(self._memory.has_host[rank] for rank in ranks):
            return None
        added, idle = 0, not (working or self._memory.in_run or self._posting.busy)
        if idle and sum(self.resident.expected()[rank] for rank in ranks) < nbytes:
            freed = self._adaptation.drop()
            added = sum(freed[rank] for rank in ranks)
        if (rest := nbytes - added) > 0:
            added += self.resident.give_way(ranks, rest, not self._memory.memory_check.offload.streams, working)
        self._memory.gave_way()
        return added

    def give_way(self, device: str, nbytes: float, poll: Poll) -> int:
        """Free `nbytes` of `device` for another program. Returns the bytes that came free. Waits for micro-steps in
        progress.

        First the ranks' allocators free unused memory. Adapters stay during a run or a call, whose later micro-steps need
        them.
        """
        freed, held = self._release_unused(device, poll), self.bytes_on(device)
        if freed < nbytes and self.make_way(device, nbytes - freed, self._memory.in_run or self._posting.busy):
            self._release_unused(device, poll)  # the ranks have moved the weights by then
        self._memory.gave_way()
        return freed + held - self.bytes_on(device)

    def _release_unused(self, device: str, poll: Poll) -> int:
        replies = wait_for(self._ranks.ask(m.ReleaseUnused(), m.UnusedReleased), poll)
        return sum(reply.freed_bytes for name, reply in zip(self.pool.devices, replies, strict=True) if name == device)

    def predict(
        self,
        call: ModelCall,
        poll: Poll,
        overlap: bool = True,
        cache: StepCache | None = None,
        on_posted: StartNext = None,
    ) -> torch.Tensor | Latents:
        """The model's output for a call with the whole latent, with the shapes and the device of `call.x`. Exact, except for
        naive patches and calls that `cache` forecasts."""
        latents, patching = latents_of(call.x), self.built.patching
        shapes = [tuple(latent.shape) for latent in latents]
        layout = TokenLayout(patching.grid(shapes[0]), companion_tokens=patching.companion_tokens(shapes))
        conditioning = self._posting.conditioning(call, layout)

        timestep = call.timestep.cpu().float()
        entry = None if cache is None else cache.call(conditioning.id, float(timestep.max()), call.may_forecast)
        if isinstance(entry, Forecast):
            return like(call.x, entry.output())
        self._memory.admit(conditioning, poll, has_token_times(timestep), different(call.residuals))
        # Packed and unpacked where the latents are: on a host it took 3.3 ms of a call at 1024 x 1024 beside an H100.
        tokens = patching.pack_all(latents).cpu()
        whole = conditioning.token_order.span
        posted = PostedCall(tokens, timestep, conditioning, whole, overlap=overlap, residuals=call.residuals)
        self.post(posted)
        try:
            if on_posted is not None:
                on_posted()
            tokens = wait_for(posted.future, poll)
        except BaseException:
            self._posting.abandon(lambda other: other is posted)
            raise
        outputs = patching.unpack_all(to_device(tokens, latents[0].device), shapes)
        if entry is not None:
            entry.outputs[0] = outputs
        return like(call.x, outputs)

    def post(self, call: PostedCall) -> None:
        """Queue the call's micro-steps. `call.future` gives the output. Raises ValueError for NaN or infinite values, too
        little memory for the run, and fewer tokens than sequence ranks."""
        check_latent(call.x, call.timestep)
        if call.run:
            assert not self.degrees.naive, "naive patches keep nothing from call to call"
            self._memory.check(call.run, call.conditioning, has_token_times(call.timestep), different(call.residuals))
        self._posting.post(call)

    def conditioning(self, call: ModelCall, layout: TokenLayout) -> Conditioning:
        """Return the ranks' copy of the call's conditioning, see ConditioningCache."""
        return self._posting.conditioning(call, layout)

    def open_run(self, extrapolate: bool = True) -> int:
        """The number of a new run, whose calls share K/V buffers on the ranks. `extrapolate`: see sampling.OpenRun."""
        with self._posting.in_order():
            run = next(self._runs)
            self._ranks.tell(m.OpenRun(run, extrapolate))
            return run

    def watch_memory(self, run: int, bands: int, extrapolate: bool, poll: Poll) -> None:
        """Ask the ranks for their free memory. The run's first call for each conditioning then raises ValueError if its
        buffers and computation do not fit. `bands`, `extrapolate`: of the run."""
        self._memory.watch(run, bands, extrapolate, poll)

    def close_run(self, run: int, poll: Poll) -> list[m.RunStats]:
        """Free the run's buffers. Returns each rank's statistics since the last report, in rank order."""
        self._memory.forget(run)
        self._posting.check()
        return wait_for(self._ranks.ask(m.CloseRun(run), m.RunStats), poll)

    def abandon(self, run: int) -> None:
        """Drop the run's calls, see Posting.abandon. The run stays open."""
        self._posting.abandon(lambda call: call.run == run)

    def discard_run(self, run: int) -> None:
        """Abandon and close the run, without waiting. The ranks finish micro-steps that were sent, at most a window."""
        self.abandon(run)
        self._memory.forget(run)
        if self.on_ranks:
            self._ranks.tell(m.CloseRun(run))

    def begin_timeline(self) -> None:
        """Begin a sampling run: the ranks drop their recorded spans, and free memory is read again."""
        self._memory.refresh()
        self._ranks.tell(m.BeginTimeline())

    def timeline(self, poll: Poll) -> list[m.Timeline]:
        """Return each rank's spans since the last `begin_timeline`, or since the model was loaded, in rank order. Raises
        RankError, which ends the ranks, for an answer with a wrong shape or values that are not finite."""
        timelines = wait_for(self._ranks.ask(m.ReadTimeline(), m.Timeline), poll)
        for each in timelines:
            spans = len(each.times)
            if (each.times.shape, each.labels.shape) != ((spans, 2), (spans, 5)) or not each.times.isfinite().all():
                shapes = f"{list(each.times.shape)} and {list(each.labels.shape)}"
                raise self.pool.refuse(each.rank, f"a timeline of {shapes}")
        return timelines

    def learn(self, error: DeviceFull) -> str:
        """Record that a device ran out of memory with this model, see MemoryGuard.learn."""
        return self._memory.learn(error)

    def _on_failure(self, error: Exception) -> None:
        """The model has left the ranks, or the pool has failed: every call, waiting or later, raises `error`."""
        self._posting.end(self._memory.explained(error))
