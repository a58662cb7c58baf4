"""Checks of a device's kernels: attention with its log-sum-exp against fp64, and the expanding of fp8 weights."""

import torch

from parallel_backend.checkpoints.packed_formats import FP8_KINDS, Fp8
from parallel_backend.core.attention_kernels import KERNELS, SDPA, AttentionKernel
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.rank.attention.kernel_choice import RankKernel

from .findings import Findings
from .session import SelfTestSession
from .tiny_model import relative

LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
"""The most relative error against fp64, by dtype."""
QUANTISED_LIMIT = 0.1
"""The same for kernels that quantise queries and keys: an estimate, not yet measured on a GPU."""
HEAD_SIZES = (16, 64, 128)
QUERIES, KEYS = 13, 55
"""A band's queries and the picture's keys; no multiples of any kernel's tile."""
MASKS = {"all keys": None, "some keys": (20, 55), "no key in one entry": (0, 31)}
"""How many of the keys each of the two batch entries may see."""


def look_at_kernels(session: SelfTestSession, findings: Findings) -> None:
    """On each different device, in this process. Keeps the kernels that there are in `session.kernels`."""
    for device in dict.fromkeys(session.settings.devices):
        for dtype, limit in LIMITS.items():
            name = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
            for kernel in KERNELS.values():
                error = _worst(kernel, device, dtype)
                if error is not None:
                    session.kernels.add(kernel.name)
                    title = "attention" if kernel.name == SDPA else kernel.title
                    findings.at_most(f"{title}, {name} on {device}", error, limit if kernel.exact else QUANTISED_LIMIT)
                    session.poll()
        if device != "cpu":
            findings.at_most(f"weights in fp8 on {device} that differ from a CPU's", float(_differing(device)), 0)
    if others := [kernel.title for name, kernel in KERNELS.items() if name not in session.kernels]:
        findings.leave_out(", ".join(others), "not installed, or they cannot serve these devices")


def heads(device: str, dtype: torch.dtype, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [2, QUERIES, 8, size], keys and values [2, KEYS, 8, size], with the strides that an all-to-all leaves."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(KEYS, 3, 2, 8, size, generator=g).to(device, dtype)
    q, k, v = (rows[:, i].transpose(0, 1) for i in range(3))
    return q[:, :QUERIES], k, v


def in_fp64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output [2, QUERIES, 8, size] and log-sum-exp [2, QUERIES, 8], float64 on the CPU."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.cpu()[:, None, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # without any key softmax gives NaN, and the output is 0
    return torch.einsum("bqhk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


def _worst(kernel: AttentionKernel, device: str, dtype_name: str) -> float | None:
    """The largest error over head sizes and masks: of the output, relative, and of the log-sum-exp, over 1 + its size.

    Only calls for which ranks use this kernel are made. None if there are no such calls on this device.
    """
    if not kernel.possible(device, dtype_name):
        return None
    dtype, taken, errors = TORCH_DTYPES[dtype_name], RankKernel(kernel, torch.device(device)), []
    for size in HEAD_SIZES:
        with_lse = taken.failure(size, dtype, lse=True) is None
        if kernel.name != SDPA and not with_lse and taken.failure(size, dtype) is not None:
            continue
        q, k, v = heads(device, dtype, size)
        for seen in MASKS.values() if kernel.masks else (None,):
            mask = None if seen is None else (torch.arange(KEYS)[None] < torch.tensor(seen)[:, None]).to(device)
            expected, expected_lse = in_fp64(q, k, v, mask)
            if with_lse or kernel.name == SDPA:
                out, lse = taken.attend_lse(q, k, v, mask, None)
                errors.append(relative(out.double().cpu(), expected))
                known = expected_lse.isfinite()
                if not torch.equal(lse.cpu().isfinite(), known):
                    return float("inf")
                apart = (lse.double().cpu() - expected_lse)[known].abs() / (1 + expected_lse[known].abs())
                errors.append(apart.max().item())
            if 0 not in (seen or ()):  # without any key `attend` may return anything, `attend_lse` returns 0
                errors.append(relative(taken.attend(q, k, v, mask, None).double().cpu(), expected))
    return max(errors, default=None)


def _differing(device: str) -> int:
    """Combinations of fp8 kind and dtype whose expanded values, scaled by row, are not bit for bit the CPU's."""
    value, scale = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2.0, 8)[:, None]
    count = 0
    for kind, stored in FP8_KINDS.items():
        packed = value.to(stored).view(torch.uint8)
        for dtype in (TORCH_DTYPES[name] for name in LIMITS):
            on_cpu = Fp8(kind, scale).expand(packed, dtype)
            on_device = Fp8(kind, scale.to(device)).expand(packed.to(device), dtype).cpu()
            count += not torch.equal(on_cpu, on_device)
    return count
