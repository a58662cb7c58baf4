"""A GPU's memory that a rank takes beside the model's tensors: bytes, each figure with its source.

No figure was measured with this product, which has never run on several GPUs.
"""

CONTEXT = 500_000_000
"""The CUDA context of one process. Public figures of single cards: 447 MB on an RTX 6000 Ada with torch 2.10 and CUDA 13
(unslothai/unsloth-zoo #1053); 300 to 400 MB since CUDA 11.7, which loads kernels at their first use (pytorch #107667 and
#109888). Kernels that are loaded later add to it. Not known by architecture; AMD's is not known at all."""

COMMUNICATOR = 100_000_000
"""One NCCL communicator on one rank, with what its sums take: about 10 MiB for each channel and neighbour on a ring
(pytorch's trace in nccl #1685), with the few channels that two to four cards on PCIe have. The memory grows with the
communicators (nccl #864, #986)."""

CONNECTION = 2 * (12 << 20)
"""What a rank takes for sends to one other rank of a communicator, and receives from it: 12 MiB a channel, 10 to receive
into and 2 to send (the same trace). PCIe has two channels for each other rank, NVLink twice as many as links, up to 32
(nccl src/graph/paths.cc, ncclTopoGetNchannels; src/enqueue.cc connects all of them at the first send). With 32 it is 2.8 GB
for seven other ranks, where 3.3 GB were seen on eight H100. Ranks take it before they read weights, so all checks but the
one before loading find it taken."""

WORKSPACES = 2 * (32 << 20)
"""What torch keeps for cuBLAS and for cuBLASLt after the first product, at most: 32 MiB each from Hopper on, 8.5 and 4 MiB
before (ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp)."""

COPY_RATE = 12e9
"""Bytes a second from the host's page-locked memory to a GPU whose rate is not known, as it was too full to be measured.
PCIe 3.0 with 16 lanes or 4.0 with 8 carries this: 15.75e9 by the standard, less its overhead."""


def context_bytes(device: str) -> int:
    """Of a rank's process on `device`, before it has a model; 0 on a CPU."""
    return CONTEXT if "cuda" in device else 0
