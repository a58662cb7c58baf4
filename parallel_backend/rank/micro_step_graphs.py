"""CUDA graphs of a rank's micro-steps: a micro-step's work on the device, recorded once and replayed by a single call.

For a small micro-step the host takes longer to launch the kernels one by one than the device takes to run them. A graph
launches all of them at once, in later micro-steps of the same *kind*. The captured work is the stage's forward, from its
inputs on the device to its output, without transfers and without copies between host and device.

A graph repeats its kernels with the same memory and the same numbers from the host. So:
- Tensors that differ between micro-steps of a kind (MicroStepInputs) are copied into the graph's inputs before a replay. The
  weight of extrapolation is a tensor too (KVBuffer.weights).
- Everything else by which the forward decides on the host makes up the kind (Kind, MicroStepState.pattern). The addresses of
  keys and values (MicroStepState.addresses) change with each call if they are extrapolated: then a kind has two graphs.
- At a replay `ModuleCache.follow` and `KVBuffer.follow` repeat a micro-step's effects on the host.
- Nothing that outlives a replay is in the graphs' memory: the output is copied; keys, values, and outputs of modules that a
  call's bands share (ModuleCache, `steady`) have other memory. So all graphs of a rank share one memory pool, and may be
  replayed in any order.

A micro-step is captured after another of its kind has run and has left no new state. The first one of a size is captured and
replayed right after its own run, to compare the outputs: a kernel that is not launched on torch's stream is in no graph, and
no error tells it. If a capture fails or a replay gives another output, all later micro-steps of the model run without
graphs.
"""

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.core.spans import Span
from parallel_backend.rank.attention.kv_buffer import KVBuffer, LayerBuffer
from parallel_backend.rank.stage.module_cache import ModuleCache, ModuleCall
from parallel_backend.wire.sampling import Step

from .conditioning_store import RankConditioning

log = logging.getLogger(__name__)

MOST_GRAPHS = 256
"""Maximum number of graphs of a model on a rank: those of 32 bands of four prompts with two each. More are not captured."""
ROUNDING = 16
"""Largest allowed distance of a replay's output from the original, relative to the output's norm, in units of the dtype's
epsilon. Most kernels give equal bits again; a product that sums in no fixed order does not."""


@dataclass(frozen=True)
class MicroStepInputs:
    """Tensors on the rank's device that differ between micro-steps of a kind."""

    timestep: torch.Tensor
    """Like Step.timestep."""
    x: torch.Tensor
    """Like Step.x, in the rank's dtype."""
    received: tuple[torch.Tensor, ...] = ()
    """Tensors received from the previous stage."""

    @property
    def form(self) -> tuple[Hashable, ...]:
        """(Shape, dtype) of each input tensor, in order."""
        return tuple((tensor.shape, tensor.dtype) for tensor in self._tensors)

    def clone(self) -> "MicroStepInputs":
        return MicroStepInputs(self.timestep.clone(), self.x.clone(), tuple(tensor.clone() for tensor in self.received))

    def copy_from(self, other: "MicroStepInputs") -> None:
        for target, source in zip(self._tensors, other._tensors, strict=True):
            target.copy_(source)

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.timestep, self.x, *self.received


@dataclass(frozen=True)
class Kind:
    """Fields of a Step message that are equal for micro-steps with the same graph."""

    run: int
    conditioning: int
    tokens: Span
    entries: Span
    with_text: bool
    stale: bool

    @staticmethod
    def of(step: Step) -> "Kind":
        return Kind(step.run, step.conditioning, step.tokens, step.entries, step.with_text, step.stale)

    @property
    def size(self) -> tuple[Hashable, ...]:
        """Equal for kinds whose kernels differ only in addresses and values."""
        return len(self.tokens), len(self.entries), self.with_text, self.stale, self.run > 0


@dataclass
class MicroStepState:
    """State on the rank that a micro-step reads and changes. To be used after ModuleCache.begin_step."""

    step: Step
    conditioning: RankConditioning
    cache: ModuleCache
    buffer: KVBuffer | None

    def pattern(self) -> Hashable:
        """Return the host state that the forward's branches depend on, in addition to Kind."""
        return self.cache.pattern(), None if self.buffer is None else self.buffer.pattern()

    def addresses(self) -> tuple[int, ...]:
        return () if self.buffer is None else self.buffer.addresses()

    def made(self) -> Hashable:
        """Changes in a micro-step that leaves state which its replay would not leave. Unchanged by all others."""
        without_last = () if self.buffer is None else [layer.last is None for layer in self.buffer.layers.values()]
        return self.cache.made(), self.conditioning.made, tuple(without_last)

    def slots(self) -> dict[int, LayerBuffer]:
        """See KVBuffer.slots."""
        return {} if self.buffer is None else self.buffer.slots()

    def undo(self, slots: Mapping[int, LayerBuffer]) -> None:
        """Undo the effects of a failed capture on the host since `slots` was read. The device has computed nothing."""
        # Cached outputs and the conditioning's shared values may be of the capture, so all of them are computed again.
        self.cache.forget()
        self.cache.end_step()
        self.cache.begin_step(self.step, self.conditioning.is_whole(self.step))
        self.conditioning.kept.clear()
        if self.buffer is not None:
            self.buffer.restore(slots)


Outputs = tuple[torch.Tensor, ...]
"""A micro-step's output, followed by the other tensors that the next stage gets."""
Work = Callable[[MicroStepInputs], Outputs]
"""The forward, which runs entirely on the device: inputs -> outputs."""


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a second stream of the device, the same one for the life of the process."""
    stream = torch.cuda.Stream(device)
    warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch says once a process that it is a prototype
    # torch allocates a workspace at a stream's first matrix product and never frees it. Inside a capture it would be in the
    # graphs' pool, which could then not be freed either.
    with torch.cuda.stream(stream):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros(16, 16, device=device, dtype=dtype)
            torch.addmm(x[0], x, x @ x)
    return stream


class CudaCaptures:
    """Captures graphs on one device. They share a memory pool."""

    def __init__(self, device: torch.device):
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Record the kernels of `work` without running them. Returns its outputs and a function that replays the graph.

        The outputs are valid from a replay until the next replay of any graph. Raises the errors of `work`, and RuntimeError
        for work that a graph cannot contain.
        """
        graph, sync_mode = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode()
        # Not torch.cuda.graph, which first waits for the whole device, and so for transfers that other ranks have yet to
        # begin. Waiting for the present stream is enough: the captured work reads tensors of that stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Errors of this thread's calls only: the heartbeat's thread and NCCL's query events during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                # Work that makes the host wait for the device raises before it does. A wait would invalidate the capture,
                # and most versions of torch never end an invalid one: the allocator counts it as in progress for ever.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    outputs = work()
                finally:
                    torch.cuda.set_sync_debug_mode(sync_mode)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # says that the capture is invalid, but not why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        # torch takes no capture into a pool whose graphs have all ended ("use_count > 0 INTERNAL ASSERT FAILED" in its
        # allocator), so the first one stays, although nothing may replay it again.
        self._first = self._first or graph
        return outputs, graph.replay


CAPTURES: dict[str, Callable[[torch.device], CudaCaptures]] = {"cuda": CudaCaptures}
"""Type of device -> its captures. Other devices have no graphs."""


@dataclass(frozen=True)
class _Graph:
    """A kind's graph, for one set of addresses of keys and values."""

    inputs: MicroStepInputs
    results: Outputs
    """The outputs, in the graphs' memory."""
    replay: Callable[[], None]
    layers: tuple[int, ...]
    """Layers in which the graph begins a call, see KVBuffer.follow."""
    outputs: Mapping[ModuleCall, Any]
    """Outputs that the graph computes for the call's other bands, in the cache's memory."""

    def start(self, inputs: MicroStepInputs) -> Outputs:
        """Replay the graph. Returns copies of the outputs, because the next replay overwrites them."""
        self.inputs.copy_from(inputs)
        self.replay()
        return tuple(result.clone() for result in self.results)


class MicroStepGraphs:
    """The graphs of one model's micro-steps on a rank."""

    def __init__(
        self,
        device: torch.device,
        block_done: Callable[[], None],
        alone: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        refused: str = "",
    ):
        """`block_done`: called at a replay, in place of the hooks of the rank's blocks. `alone()`: context in which no other
        thread queries the device. `refused`: see the attribute."""
        self._device, self._block_done, self._alone = device, block_done, alone
        self.refused = ""
        """Why no micro-step is captured, as a clause for the user. Empty: they are captured."""
        self._captures: CudaCaptures | None = None
        # Keys: kind, form of the inputs and pattern; graphs also by addresses. Steady: may be captured.
        self._steady: set[tuple[Kind, Hashable, Hashable]] = set()
        self._graphs: dict[tuple[Kind, Hashable, Hashable, tuple[int, ...]], _Graph] = {}
        self._compared: set[tuple[Hashable, ...]] = set()  # sizes and forms
        self.captured, self.replayed = 0, 0
        if refused:
            self._refuse(refused)

    def run(self, state: MicroStepState, inputs: MicroStepInputs, work: Work) -> Outputs:
        """Return the outputs `work(inputs)`, computed by a graph if there is one or one can be captured."""
        if self.refused:
            return work(inputs)
        kind = Kind.of(state.step), inputs.form, state.pattern()
        graph = self._graphs.get((*kind, state.addresses()))
        if graph is not None:
            output = graph.start(inputs)
            state.cache.follow(graph.outputs)
            if state.buffer is not None:
                state.buffer.follow(graph.layers)
            self._block_done()
            self.replayed += 1
            return output
        if kind in self._steady and len(self._graphs) < MOST_GRAPHS:
            graph = self._capture(kind, state, inputs, work)
            if graph is not None:
                return graph.start(inputs)
            return work(inputs)
        size, made, found = (*kind[0].size, inputs.form), state.made(), state.cache.of_call()
        kept = None if size in self._compared else inputs.clone()  # the forward may write to its inputs
        output = work(inputs)
        if state.made() != made:
            return output
        self._steady.add(kind)
        if kept is not None:
            self._compared.add(size)
            output = self._compare(state, kept, work, output, found)
        return output

    def drop(self, which: Callable[[Kind], bool] | None = None) -> None:
        """Drop the graphs of these kinds, whose memory is about to be freed or moved. None: drop all, also what was
        compared."""
        if which is None:
            self._compared.clear()
        self._steady = {known for known in self._steady if which is not None and not which(known[0])}
        self._graphs = {known: graph for known, graph in self._graphs.items() if which is not None and not which(known[0])}
        if not self._graphs:
            self._captures = None  # frees the pool of memory

    def report(self) -> tuple[int, int]:
        """Return (micro-steps captured, micro-steps replayed) since the last report."""
        counts = self.captured, self.replayed
        self.captured = self.replayed = 0
        return counts

    def _compare(
        self,
        state: MicroStepState,
        inputs: MicroStepInputs,
        work: Work,
        output: Outputs,
        found: Mapping[ModuleCall, Any],
    ) -> Outputs:
        """Capture and replay the micro-step once more. If the replay gives another output, stop using graphs. Returns the
        outputs. `output`: just computed by `work(inputs)`. `found`: the call's cached outputs before that."""
        now, again = state.cache.of_call(), inputs.clone()
        # Keys and values are not extrapolated a second time, since their call has begun: the same rows are written over
        # themselves, and the output is the same.
        state.cache.again(found)
        recorded = self._record(state, lambda: work(again))
        if recorded is None:
            return output
        replayed, replay = recorded
        replay()
        if all(map(_is_same, output, replayed)):
            state.cache.follow(now)
            return output
        self._refuse("a replay gave a different output from the micro-step that it repeats")
        state.cache.again(found)  # keys, and outputs that bands share, are what the replay has made of them
        return work(inputs)

    def _capture(
        self, kind: tuple[Kind, Hashable, Hashable], state: MicroStepState, inputs: MicroStepInputs, work: Work
    ) -> _Graph | None:
        """Capture a graph and do the host's part of the micro-step. None if the capture fails; then no state has changed."""
        slots, outputs, addresses, graph_inputs = state.slots(), state.cache.of_call(), state.addresses(), inputs.clone()
        recorded = self._record(state, lambda: work(graph_inputs))
        if recorded is None:
            return None
        begun = tuple(layer for layer, slot in state.slots().items() if slot.call != slots[layer].call)
        fresh = {call: out for call, out in state.cache.of_call().items() if call not in outputs}
        self._graphs[(*kind, addresses)] = graph = _Graph(graph_inputs, *recorded, begun, fresh)
        self.captured += 1
        return graph

    def _record(self, state: MicroStepState, work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]] | None:
        """See CudaCaptures.capture. None if it fails: then no state has changed, and no more graphs are captured."""
        made, slots = state.made(), state.slots()
        try:
            if self._captures is None:
                self._captures = CAPTURES[self._device.type](self._device)
            with self._alone():
                recorded = self._captures.capture(work)
            if state.made() != made:
                raise RuntimeError("it makes a value that later micro-steps need")
        except Exception as error:  # whatever the model's code, a kernel's package or the driver may raise
            state.undo(slots)
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            self._refuse(f"a micro-step was not captured: {reason}")
            return None
        return recorded

    def _refuse(self, why: str) -> None:
        """Stop using graphs. `why`: a clause for the user."""
        self.refused = why
        self.drop()
        log.warning("Parallel DiT: cuda_graphs: the model runs without them, because %s", why)


def _is_same(output: torch.Tensor, replayed: torch.Tensor) -> bool:
    """Whether the outputs differ at most by ROUNDING. True for any output with NaN or infinity."""
    size = torch.linalg.vector_norm(output, dtype=torch.float32)
    distance = torch.linalg.vector_norm(replayed - output, dtype=torch.float32)
    limit = ROUNDING * torch.finfo(output.dtype).eps * size
    return bool((distance <= limit) | ~size.isfinite())
