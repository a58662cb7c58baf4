"""A GPU's memory that a rank takes beside the model's tensors: bytes, each figure with its source.

No figure was measured with this product, which has never run on several GPUs. Parallel Self-Test reports the real ones.
"""

CONTEXT = 500_000_000
"""The CUDA context of one process. Public figures of single cards: 447 MB on an RTX 6000 Ada with torch 2.10 and CUDA 13
(unslothai/unsloth-zoo #1053); 300 to 400 MB since CUDA 11.7, which loads kernels at their first use (pytorch #107667 and
#109888). Kernels that are loaded later add to it. Not known by architecture; AMD's is not known at all."""

COMMUNICATOR = 100_000_000
"""Buffers of one NCCL communicator on one rank: about 10 MiB for each channel and peer (pytorch's trace in nccl #1685), with
the few channels that two to four cards on PCIe have. NVLink has more channels and takes more: 3.3 GB for one all-to-all over
eight H100 (same issue). The memory grows with the communicators (nccl #864, #986)."""

WORKSPACES = 2 * (32 << 20)
"""What torch keeps for cuBLAS and for cuBLASLt after the first product, at most: 32 MiB each from Hopper on, 8.5 and 4 MiB
before (ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp)."""

STAGED = 2
"""Hidden states of a micro-step that a pipeline's rank has beside its computing: those that it sends and receives."""

COPY_RATE = 12e9
"""Bytes a second from the host's page-locked memory to a GPU whose rate is not known, as it was too full to be measured.
PCIe 3.0 with 16 lanes or 4.0 with 8 carries this: 15.75e9 by the standard, less its overhead."""


def context_bytes(device: str) -> int:
    """Of a rank's process on `device`, before it has a model; 0 on a CPU."""
    return CONTEXT if "cuda" in device else 0
