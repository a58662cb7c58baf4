"""NCCL for rank threads on emulated devices: the strict transport (tests/support/strict), with NCCL's use of streams.

Every communicator has a stream of its own on each device. An operation waits there for what is on the current stream, and
`wait` lets the current stream, not the host, wait for it (torch 2.13, ProcessGroupNCCL.cpp).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from testing.mailbox import Group, P2POp
from testing.thread_ranks import thread_ranks
from tests.support.strict.distributed import StrictDistributed, StrictWork
from tests.support.strict.operation import Communicator
from tests.support.strict.rules import Rules

from .machine import Clock, machine, merge
from .streams import Stream, current_stream, gpu, here, wait_of_host
from .tensors import CudaTensor, begin


@dataclass
class NcclWork:
    """`kept`: the tensors of an operation, which live until it has been waited for."""

    work: StrictWork
    stream: Stream
    clock: Clock
    kept: list[torch.Tensor]

    def wait(self, timeout: Any = None) -> bool:
        self.work.wait()
        with machine.lock:
            merge(current_stream(self.stream.gpu.index).clock, self.clock)
        self.kept = []
        return True


class EmulatedNccl(StrictDistributed):
    """See StrictDistributed."""

    def __init__(self, rules: Rules | None = None):
        super().__init__(rules or Rules())
        self._streams: dict[tuple[Any, Communicator, int], Stream] = {}

    def get_backend(self, group: Group | None = None) -> str:
        return "nccl"

    def is_nccl_available(self) -> bool:
        return True

    def isend(self, tensor: torch.Tensor, dst: int, group: Group | None = None) -> NcclWork:
        return self._on_stream(
            self._link(dst, group), [tensor], [], lambda: StrictDistributed.isend(self, _inner(tensor), dst, group)
        )

    def irecv(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> NcclWork:
        return self._on_stream(
            self._link(src, group), [], [tensor], lambda: StrictDistributed.irecv(self, _inner(tensor), src, group)
        )

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[NcclWork]:
        sends = [operation.tensor for operation in p2p_op_list if operation.op == self.isend]
        receives = [operation.tensor for operation in p2p_op_list if operation.op != self.isend]
        inner = [replace(operation, tensor=_inner(operation.tensor)) for operation in p2p_op_list]
        communicator = self._communicator(p2p_op_list[0].group)
        issue = lambda: StrictDistributed.batch_isend_irecv(self, inner)[0]  # noqa: E731
        return [self._on_stream(communicator, sends, receives, issue)]

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group: Group | None = None,
        async_op: bool = False,
    ) -> NcclWork | None:
        def issue() -> StrictWork:
            sizes = output_split_sizes, input_split_sizes
            return StrictDistributed.all_to_all_single(self, _inner(output), _inner(input), *sizes, group, True)

        return self._started(self._on_stream(self._communicator(group), [input], [output], issue), async_op)

    def all_reduce(self, tensor: torch.Tensor, group: Group | None = None, async_op: bool = False) -> NcclWork | None:
        def issue() -> StrictWork:
            with torch.inference_mode(tensor.is_inference()):
                return StrictDistributed.all_reduce(self, _inner(tensor), group, True)

        return self._started(self._on_stream(self._communicator(group), [], [tensor], issue), async_op)

    def barrier(self, group: Group | None = None, device_ids: list[int] | None = None) -> None:
        super().barrier(group, device_ids)
        wait_of_host("barrier")

    def _on_stream(
        self,
        communicator: Communicator,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        issue: Callable[[], StrictWork],
    ) -> NcclWork:
        if any(not isinstance(tensor, CudaTensor) for tensor in (*reads, *writes)):
            raise RuntimeError("No backend type associated with device type cpu")
        devices = {tensor.get_device() for tensor in (*reads, *writes)}
        if len(devices) != 1:
            raise RuntimeError("Tensors of one operation are on several devices")
        (device,) = devices
        if device != here.device:
            machine.record.violation(f"NCCL on cuda:{device} while the thread's device is cuda:{here.device}")
        if here.capture is not None:
            here.capture.forbid("an operation of NCCL")
        stream = self._stream_of(communicator, device)
        with machine.lock:
            merge(stream.clock, current_stream(device).clock)
            begin(stream, reads, writes)
            clock = dict(stream.clock)
        return NcclWork(issue(), stream, clock, [*reads, *writes])

    def _stream_of(self, communicator: Communicator, device: int) -> Stream:
        key = self._here.member.fabric, communicator, device
        if key not in self._streams or self._streams[key].gpu is not gpu(device):
            self._streams[key] = Stream(device)
        return self._streams[key]


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, CudaTensor)
    return tensor.inner


@contextlib.contextmanager
def gpu_ranks(rules: Rules | None = None) -> Iterator[Callable[..., Any]]:
    """As thread_ranks: rank threads that talk by this NCCL."""
    with thread_ranks(EmulatedNccl(rules)) as start:
        yield start
