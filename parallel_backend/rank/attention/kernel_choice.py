"""Which attention kernel a rank takes. flash-attn has to compute once on this device first: a wheel that is installed may be
for another torch or another GPU, which shows at its first call only."""

import logging
from dataclasses import replace

import torch

from parallel_backend.core.dtypes import compute_dtype, compute_name
from parallel_backend.core.validate import flash_possible

from .kernels import Kernel, flash, flash_lse, sdpa, sdpa_lse

log = logging.getLogger(__name__)

FLASH, SDPA = Kernel("flash", flash, flash_lse), Kernel("sdpa", sdpa, sdpa_lse)
TRIAL_TOKENS, TRIAL_HEADS = 32, 2
TOLERANCE = 0.05
"""Between a half-precision kernel and the formula in fp32, on values within 1."""
LONGEST_REASON = 200
"""Characters."""


def choose_kernel(attention: str, device: torch.device, dtype: str, head_size: int = 64, ring: bool = False) -> Kernel:
    """The kernel for an `attention` of auto, sdpa or flash, heads of this size and weights of dtype `dtype`.

    `auto`: flash-attn if it is installed, supports the GPU and computes what the formula says; torch's SDPA otherwise. With
    `ring` the log-sum-exp of SDPA has to be right too. ValueError if what the user asks for does not run here.
    """
    failure = None
    if attention in ("auto", "flash") and flash_possible(str(device), dtype):
        failure = trial(FLASH, device, dtype, head_size)
        if failure is None:
            return _described(FLASH, "flash-attn", device, dtype)
        log.warning("flash-attn is not used, since its trial failed: %s", failure)
    if attention == "flash":
        why = f"failed its trial: {failure}" if failure else "is not installed here or cannot serve this device and dtype"
        raise ValueError(f"attention is 'flash', but flash-attn {why}. Use 'auto' or 'sdpa'.")
    if ring and device.type == "cuda" and (wrong := trial(SDPA, device, dtype, head_size)):
        where = f"{torch.cuda.get_device_name(device)} in {compute_name(dtype)}"
        raise ValueError(
            f"ring_degree needs attention with its log-sum-exp, and torch's kernels for {where} do not give it ({wrong}). "
            "Set ring_degree to 1 and use ulysses_degree."
        )
    return _described(
        SDPA, f"torch SDPA, since flash-attn failed a trial ({failure})" if failure else "torch SDPA", device, dtype
    )


def trial(kernel: Kernel, device: torch.device, dtype: str, head_size: int) -> str | None:
    """Why a kernel cannot be used for heads of this size; None if it computes what the formula says."""
    count = TRIAL_TOKENS * TRIAL_HEADS * head_size
    values = torch.arange(3 * count).sin().view(3, 1, TRIAL_TOKENS, TRIAL_HEADS, head_size)
    expected = sdpa_lse(*values, None, None)
    try:
        q, k, v = values.to(device, compute_dtype(dtype, device))
        found = kernel.attend(q, k, v, None, None), *kernel.attend_lse(q, k, v, None, None)
        found = [part.float().cpu() for part in found]  # waits: a kernel that cannot run says so now
    except Exception as error:  # whatever a foreign package's import or first call may raise
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:LONGEST_REASON]
    right = zip(found, (expected[0], *expected), strict=True)
    return None if all(torch.allclose(*pair, atol=TOLERANCE, rtol=TOLERANCE) for pair in right) else "its results are wrong"


def _described(kernel: Kernel, text: str, device: torch.device, dtype: str) -> Kernel:
    """With the words of the run's report. None on CPUs, which have one kernel."""
    if device.type != "cuda":
        return kernel
    untried = " on ROCm, where Parallel DiT has never been tried" if torch.version.hip else ""
    return replace(kernel, said=f"{text} in {compute_name(dtype)}{untried}")
