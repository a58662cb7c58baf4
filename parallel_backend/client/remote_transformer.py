"""What the nodes call: a model that lives on a pool of ranks and answers `predict`.

A call is cut into micro-steps (batch entries over replicas, entries of an exact call one by one through the pipeline),
posted in order with a small window, and its outputs, shard by shard, are put together again (see micro_step_queue.py).
"""

import math
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import replace

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import SEQUENCE_AXES, WIDGETS
from parallel_backend.core.setup import Setup
from parallel_backend.families.base.patching import Latents, latents_of, like
from parallel_backend.placement.balance import Balance
from parallel_backend.placement.memory_check import SHARED
from parallel_backend.placement.pipeline_model import StageCost
from parallel_backend.placement.residency import shared_bytes
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire import messages as m

from .call import Conditioning, ModelCall, PostedCall, TokenLayout, has_token_times
from .giving_way import give_way, hand_over
from .lora import Adaptation, Delta
from .memory_guard import MemoryGuard
from .not_finite import check_latent
from .posting import Posting
from .resident_weights import ResidentWeights
from .runs import Runs
from .step_cache import Forecast, StepCache


class RemoteTransformer:
    """A checkpoint on the ranks of a pool, cut by the degrees of `setup`. Made by loading.load_model. Thread-safe.

    `balance`: which blocks and which share of the picture each rank has.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        balance: Balance,
        memory: MemoryGuard,
        posting: Posting,
        adaptation: Adaptation,
    ):
        self.checkpoint, self.setup, self.family, self.degrees = checkpoint, setup, checkpoint.family, setup.degrees
        self.balance, self._memory, self._posting, self._adaptation = balance, memory, posting, adaptation
        self._ranks, self.pool = memory.ranks, memory.ranks.pool
        self._runs = Runs(self._ranks, posting, memory)
        self._ranks.listen(posting.on_output, self._on_failure)

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
        """Whether it is still there: no other model has been loaded in its place, and no rank has failed."""
        return self._posting.alive and self.pool.error is None  # which is there before the calls hear of it

    def unload(self) -> Future:
        """Calls fail from now on, and the ranks free weights, adapters, conditioning and K/V buffers. The future ends when
        they have; micro-steps under way come first. RankError where the pool has failed."""
        self._on_failure(RuntimeError("Parallel DiT: the model has been unloaded from its ranks"))
        self._ranks.leave()
        return self._ranks.ask(m.Unload(), m.Unloaded)

    def bytes_on(self, device: str) -> int:
        """Bytes of weights and adapters on `device`, of all ranks that share it."""
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
        call: ModelCall,
        poll: Poll,
        overlap: bool = True,
        cache: StepCache | None = None,
        on_posted: Callable[[], None] = lambda: None,
    ) -> torch.Tensor | Latents:
        """The model's output for a call with the whole latent: like `call.x` in shape and device.

        Exact, but in naive patch mode, and where the run's `cache` forecasts the call. `on_posted` runs once the call is on
        its way, before it is waited for: it may make other calls.
        """
        latents, patching = latents_of(call.x), self.family.patching
        shapes = [tuple(latent.shape) for latent in latents]
        layout = TokenLayout(patching.grid(shapes[0]), companion_tokens=patching.companion_tokens(shapes))
        conditioning = self.conditioning(call, layout)

        def answer(outputs: Latents) -> torch.Tensor | Latents:
            return like(call.x, tuple(output.to(latents[0].device, non_blocking=True) for output in outputs))

        timestep = call.timestep.cpu().float()  # once, as the latents: all that looks at them looks here
        entry = None if cache is None else cache.call(conditioning.id, float(timestep.max()), call.may_forecast)
        if isinstance(entry, Forecast):
            return answer(entry.output())
        self._memory.admit(conditioning, poll, has_token_times(timestep))
        tokens = patching.pack_all(tuple(latent.cpu() for latent in latents))
        whole = conditioning.token_order.span
        posted = PostedCall(tokens, timestep, conditioning, whole, overlap=overlap, residuals=call.residuals)
        self.post(posted)
        try:
            on_posted()
            tokens = wait_for(posted.future, poll)
        except BaseException:
            self._posting.abandon(lambda other: other is posted)
            raise
        outputs = patching.unpack_all(tokens, shapes)
        if entry is not None:
            entry.outputs[0] = outputs
        return answer(outputs)

    def post(self, call: PostedCall) -> None:
        """Queue the call's micro-steps; `call.future` gives its output.

        ValueError for values that are not finite, for memory that cannot hold what the run keeps (see `watch_memory`), and
        for fewer tokens than sequence ranks.
        """
        tokens, conditioning = call.tokens, call.conditioning
        assert call.x.shape[:2] == (
            conditioning.batch,
            len(conditioning.token_order.images(tokens)) + call.companion_tokens,
        )
        assert not (call.run and self.degrees.naive), "naive patches keep nothing from call to call"
        check_latent(call.x, call.timestep)
        self._memory.check(call.run, conditioning, has_token_times(call.timestep))
        if not all(len(shard) for shard in self._posting.cut.image(tokens)):
            degrees = " x ".join(f"{WIDGETS[axis]} {n}" for axis in SEQUENCE_AXES if (n := getattr(self.degrees, axis)) > 1)
            raise ValueError(
                f"{degrees} cuts this picture (or patch of it), which has only {len(tokens)} tokens: one for each rank is "
                "the least. Use a larger picture, fewer patches or smaller degrees."
            )
        self._posting.post(call)

    def conditioning(self, call: ModelCall, layout: TokenLayout) -> Conditioning:
        """The ranks' own copy of the call's conditioning, sent only if it is not there yet (see ConditioningCache).

        ValueError if the model has no positions for so large a grid.
        """
        return self._posting.conditioning(call, layout)

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

    def _on_failure(self, error: Exception) -> None:
        """The ranks' model is this one no more, or the pool has failed: every call, waiting or to come, raises `error`."""
        self._posting.end(self._memory.explained(error))
