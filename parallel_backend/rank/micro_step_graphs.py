"""CUDA graphs of a rank's micro-steps: the device's work of one, recorded once and started again by a single call.

A small micro-step is over on the device before the host has started its kernels one by one. A graph starts all of them at
once, in later micro-steps of the same *kind*. What is captured is the forward of the stage, from its inputs on the device to
its output: no transfer, no copy between host and device.

A graph repeats its kernels with the same memory and the same numbers of the host. So:
- What differs between micro-steps of a kind (MicroStepInputs) is copied into the graph's own inputs before a replay. How far
  keys are extrapolated is a tensor too (KVBuffer.weights).
- All else that the forward goes by on the host makes the kind (Kind, MicroStepState.pattern). Where keys and values are in
  memory (MicroStepState.addresses) changes with each call if they are extrapolated: then a kind has two graphs.
- What a micro-step leaves behind on the host, `MicroStepState.follow` does at a replay.
- What outlives a replay is never in the memory of graphs: the output is copied, outputs of modules that a call's bands share
  have memory of their own (ModuleCache, `steady`), and keys and values are in theirs. So all graphs of a rank share one pool
  of memory, and may be replayed in any order.

A micro-step is captured when one of its kind has run and has made nothing new that stays. Whatever goes wrong in a capture,
the micro-step is run as without graphs, and so are all later ones of the model.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parallel_backend.core.spans import Span
from parallel_backend.rank.attention.kv_buffer import BufferSlot, KVBuffer
from parallel_backend.rank.stage.module_cache import ModuleCache, ModuleCall
from parallel_backend.wire.sampling import Step

from .conditioning_store import RankConditioning

log = logging.getLogger(__name__)

MOST_GRAPHS = 256
"""Of a model on a rank. A band has two for each prompt, so 32 bands of four prompts have as many. Others run without."""


@dataclass(frozen=True)
class MicroStepInputs:
    """What differs between micro-steps of a kind, on the rank's device."""

    timestep: torch.Tensor
    """As Step.timestep."""
    x: torch.Tensor | None
    """As Step.x, in the rank's dtype."""
    received: torch.Tensor | None
    """What the stage before has sent."""

    @property
    def form(self) -> tuple[Hashable, ...]:
        """Their sizes and dtypes."""
        return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in self._tensors)

    def clone(self) -> "MicroStepInputs":
        return MicroStepInputs(*(None if tensor is None else tensor.clone() for tensor in self._tensors))

    def copy_from(self, other: "MicroStepInputs") -> None:
        for own, theirs in zip(self._tensors, other._tensors, strict=True):
            if own is not None:
                own.copy_(theirs)

    @property
    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.timestep, self.x, self.received


@dataclass(frozen=True)
class Kind:
    """What micro-steps have in common that a graph can stand for, so far as their messages say."""

    run: int
    conditioning: int
    tokens: Span
    entries: Span
    with_text: bool
    stale: bool

    @staticmethod
    def of(step: Step) -> "Kind":
        return Kind(step.run, step.conditioning, step.tokens, step.entries, step.with_text, step.stale)


@dataclass
class MicroStepState:
    """What a micro-step finds on its rank, and what it leaves there beside its output. After ModuleCache.begin_step."""

    step: Step
    conditioning: RankConditioning
    cache: ModuleCache
    buffer: KVBuffer | None
    read_on_host: bool = False
    """The timestep's values were looked at on the host."""

    def pattern(self) -> Hashable:
        """What the forward goes by on the host, beside the message."""
        return self.cache.pattern(), None if self.buffer is None else self.buffer.pattern()

    def addresses(self) -> tuple[int, ...]:
        return () if self.buffer is None else self.buffer.addresses()

    def made(self) -> Hashable:
        """Alike before and after a micro-step that has made nothing that later ones find there, but what a replay makes."""
        without_last = () if self.buffer is None else [layer.last is None for layer in self.buffer.layers.values()]
        return self.read_on_host, self.cache.made(), self.conditioning.made, tuple(without_last)

    def slots(self) -> dict[int, BufferSlot]:
        """See KVBuffer.places."""
        return {} if self.buffer is None else self.buffer.slots()

    def follow(self, layers: tuple[int, ...], outputs: Mapping[ModuleCall, Any]) -> None:
        """A replay has done the device's part. `layers`: see KVBuffer.follow. `outputs`: see ModuleCache.follow."""
        self.cache.follow(outputs)
        if self.buffer is not None:
            self.buffer.follow(layers)

    def undo(self, slots: Mapping[int, BufferSlot]) -> None:
        """Take back what a capture has done on the host since `slots` was read: the device has computed nothing of it.

        What might be of the capture is made anew: cached outputs, and what the conditioning's micro-steps share.
        """
        self.cache.forget()
        self.cache.begin_step(self.step, self.conditioning.is_whole(self.step))
        self.conditioning.kept.clear()
        if self.buffer is not None:
            self.buffer.restore(slots)


Work = Callable[[MicroStepInputs], torch.Tensor]
"""The forward: inputs -> output, all of it on the device."""


class Captures(Protocol):
    """Makes graphs on one device. They share memory, which is theirs alone as long as there are any."""

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Record what `work` does on the device, without doing it. Its output, and what does it.

        The output has its values after the replay, until the next replay of any graph. Raises whatever `work` raises, and
        RuntimeError for what no graph can have in it.
        """


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the life of the process. torch keeps memory for products for each stream that computes some, until the end: it
    is taken here, as in a capture it would be that of the graphs, which could then never be freed."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros(16, 16, device=device, dtype=dtype)
            torch.addmm(x[0], x, x @ x)
    return stream


class CudaCaptures:
    """torch.cuda.CUDAGraph, captured on a stream of its own. Never run on a GPU so far."""

    def __init__(self, device: torch.device):
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """See Captures.

        torch.cuda.graph would first wait for the whole device, that is for transfers that other ranks have yet to begin.

        Work that stops the host raises before it does (torch's sync debug mode). A stop in a capture makes it void, and
        torch, but for its latest versions, does not come out of a void capture: the allocator counts it as under way for
        ever.
        """
        graph, stops = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Of this thread alone: that of heartbeats asks for events meanwhile, as NCCL's own do.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    output = work()
                finally:
                    torch.cuda.set_sync_debug_mode(stops)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says that the capture is void, and not why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return output, graph.replay


CAPTURES: dict[str, Callable[[torch.device], Captures]] = {"cuda": CudaCaptures}
"""By the device's kind. Others have no graphs."""


@dataclass(frozen=True)
class _Graph:
    """The graph of a kind, for one place of keys and values."""

    inputs: MicroStepInputs
    output: torch.Tensor
    """In the graphs' memory."""
    replay: Callable[[], None]
    layers: tuple[int, ...]
    """Those in which it begins a call, see KVBuffer.follow."""
    outputs: Mapping[ModuleCall, Any]
    """Those that it computes for the call's other bands, in memory of the cache."""

    def start(self, inputs: MicroStepInputs) -> torch.Tensor:
        """Have the device do it. The output is the caller's."""
        self.inputs.copy_from(inputs)
        self.replay()
        return self.output.clone()


class MicroStepGraphs:
    """The graphs of one model's micro-steps on a rank."""

    def __init__(self, device: torch.device, block_done: Callable[[], None]):
        """`block_done`: is called as if each of the rank's blocks had run, at a replay."""
        self._device, self._block_done = device, block_done
        self._captures: Captures | None = None
        self._failed = False
        # Kinds that may be captured, and graphs, both with the pattern and form of what the forward found.
        self._steady: set[tuple[Kind, Hashable, Hashable]] = set()
        self._graphs: dict[tuple[Kind, Hashable, Hashable, tuple[int, ...]], _Graph] = {}
        self.captured, self.replayed = 0, 0

    def run(self, state: MicroStepState, inputs: MicroStepInputs, work: Work) -> torch.Tensor:
        """What `work(inputs)` gives, by a graph where there is or can be one."""
        kind = Kind.of(state.step), inputs.form, state.pattern()
        graph = self._graphs.get((*kind, state.addresses()))
        if graph is not None:
            output = graph.start(inputs)
            state.follow(graph.layers, graph.outputs)
            self._block_done()
            self.replayed += 1
            return output
        if kind in self._steady and not self._failed and len(self._graphs) < MOST_GRAPHS:
            graph = self._capture(kind, state, inputs, work)
            if graph is not None:
                return graph.start(inputs)
        made = state.made()
        output = work(inputs)
        if state.made() == made:
            self._steady.add(kind)
        return output

    def drop(self, which: Callable[[Kind], bool] = lambda kind: True) -> None:
        """Drop the graphs of these kinds: what is in their memory is gone, or has moved."""
        self._steady = {known for known in self._steady if not which(known[0])}
        self._graphs = {known: graph for known, graph in self._graphs.items() if not which(known[0])}
        if not self._graphs:
            self._captures = None  # their memory goes with the last of them

    def report(self) -> tuple[int, int]:
        """(micro-steps captured, micro-steps replayed) since the last report."""
        counts = self.captured, self.replayed
        self.captured = self.replayed = 0
        return counts

    def _capture(
        self, kind: tuple[Kind, Hashable, Hashable], state: MicroStepState, inputs: MicroStepInputs, work: Work
    ) -> _Graph | None:
        """None where it fails: all is then as it was before. Else the host has done its part of the micro-step."""
        made, slots, outputs, addresses = state.made(), state.slots(), state.cache.of_call(), state.addresses()
        try:
            own = inputs.clone()
            if self._captures is None:
                self._captures = CAPTURES[self._device.type](self._device)
            output, replay = self._captures.capture(lambda: work(own))
            if state.made() != made:
                raise RuntimeError("it makes something that later micro-steps find")
        except Exception as error:  # of whatever the model's code, a kernel's package or the driver may raise
            self._failed = True
            self.drop()
            state.undo(slots)
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            log.warning("Parallel DiT: cuda_graphs: the model runs without, since a micro-step was not captured: %s", reason)
            return None
        begun = tuple(layer for layer, slot in state.slots().items() if slot.call != slots[layer].call)
        fresh = {call: out for call, out in state.cache.of_call().items() if call not in outputs}
        self._graphs[(*kind, addresses)] = graph = _Graph(own, output, replay, begun, fresh)
        self.captured += 1
        return graph
