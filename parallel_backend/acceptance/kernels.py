"""Checks a device's attention kernels with the same trials that a rank makes before it uses them
(rank/attention/kernel_choice.py)."""

import torch

from parallel_backend.core.attention_kernels import KERNELS, SDPA, AttentionKernel
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.rank.attention.kernel_choice import RankKernel

from .session import Findings, SelfTestSession

DTYPES = ("fp32", "fp16", "bf16")
HEAD_SIZES = (16, 64, 128)


def look_at_attention(session: SelfTestSession, findings: Findings) -> None:
    """Check the kernels on each different device, in this process. SDPA must work, because it replaces kernels that fail."""
    absent = dict.fromkeys(KERNELS, "not installed, or it cannot serve these devices")
    for device in dict.fromkeys(session.settings.devices):
        for dtype in DTYPES:
            for kernel in KERNELS.values():
                if not kernel.possible(device, dtype):
                    continue
                absent.pop(kernel.name, None)
                failed = _failures(kernel, device, dtype)
                title = f"{kernel.title}, {dtype} on {device}"
                findings.note(title, f"failed trials: {', '.join(failed)}" if failed else "passed its trials")
                findings.expect(not failed or kernel.name != SDPA, f"{title}: {', '.join(failed)}")
                session.poll()
    for name, reason in absent.items():
        findings.leave_out(KERNELS[name].title, reason)


def _failures(kernel: AttentionKernel, device: str, dtype: str) -> list[str]:
    """Return the trials that failed, with the reasons. A trial runs with and without masks if the kernel supports masks."""
    taken, failed = RankKernel(kernel, torch.device(device)), []
    for size in HEAD_SIZES:
        for lse in (False, True) if kernel.lse else (False,):
            if (why := taken.failure(size, TORCH_DTYPES[dtype], lse)) is not None:
                failed.append(f"heads of {size}{' with a log-sum-exp' * lse} ({why})")
    return failed
