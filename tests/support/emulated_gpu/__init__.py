"""CUDA devices with real numerics on a CPU build of torch.

A tensor of device cuda:N is a wrapper whose values are in host memory (tensors.py). An operation runs at once, on the CPU.
What a device would do later, or beside other work, is followed by vector clocks over streams, events and the host
(streams.py): a read, a write or a free that nothing orders after the one before it is a violation, though its result is
right here. Copies to page-locked memory arrive when the host has waited for them (host.py). A graph is recorded and replayed
(graphs.py). NCCL's operations run on streams of their own (nccl.py). torch.cuda answers for the cards (cuda.py).

    with emulated(ADA, ADA) as gpus:
        ...
    # leaving it raises Violation if there was one

What is not here: kernels and their speed, fragmentation of memory, generators on the device, torch.compile, Triton. Clocks
are those of the process, not of each of its threads: what one thread has waited for, all of them count as over.
"""

from .cuda import emulated as emulated
from .machine import Violation as Violation
