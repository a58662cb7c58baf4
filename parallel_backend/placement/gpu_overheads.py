"""GPU memory that a rank takes in addition to the model's tensors, in bytes, each figure with its source. No figure was
measured with this product, which has never run on several GPUs."""

CONTEXT = 500_000_000
"""The CUDA context of one process. Public figures of single GPUs: 447 MB on an RTX 6000 Ada with torch 2.10 and CUDA 13
(unslothai/unsloth-zoo #1053); 300 to 400 MB since CUDA 11.7, which loads kernels at their first use (pytorch #107667 and
#109888). Kernels that are loaded later add to it. It is unknown by architecture, and unknown for AMD."""

COPY_RATE = 12e9
"""Assumed bytes a second from the host's page-locked memory to a GPU that was too full to be measured. PCIe 3.0 with 16
lanes or 4.0 with 8 carries this: 15.75e9 by the standard, minus its overhead."""


def context_bytes(device: str) -> int:
    """Return the bytes that a rank's process takes on `device` before it has a model. 0 on a CPU."""
    return CONTEXT if "cuda" in device else 0
