"""Chooses the attention kernel of a rank, and sends the calls that the kernel does not support to SDPA.

A kernel is tried on the device first: an installed wheel may be built for another torch or another GPU, and only its first
call shows that.
"""

import importlib
import logging
from typing import Any

import torch

from parallel_backend.core.attention_kernels import KERNELS, SDPA, AttentionKernel, variant_of, wanted
from parallel_backend.core.dtypes import compute_dtype, compute_name

from .kernels import sdpa

log = logging.getLogger(__name__)

TRIAL_QUERIES, TRIAL_KEYS, TRIAL_HEADS = 45, 77, 3
"""They are not multiples of any kernel's tile size, and all differ."""
TRIAL_SEEN = (20, TRIAL_KEYS)
"""Number of keys that the mask leaves to each of the trial's two batch entries."""
TOLERANCE = 0.05
"""Largest allowed difference between a half-precision or quantizing kernel and SDPA in fp32, for values within 1."""
LONGEST_REASON = 200
"""Maximum characters of a reason."""


class RankKernel:
    """A rank's attention: one kernel, and SDPA for calls that the kernel does not support.

    The kernel is tried once for each head size and dtype, with and without the log-sum-exp. `attend` and `attend_lse` are
    those of kernels/__init__.py, but several neighbouring query heads may share one head of keys and values.
    """

    def __init__(self, kernel: AttentionKernel, device: torch.device, refused: str = "", variant: str = ""):
        """`refused`: why this is not the kernel that the user asked for, as text for the report. `variant`: a key of
        SAGE_VARIANTS, or empty."""
        self.kernel, self._device, self._refused, self._variant = kernel, device, refused, variant
        self._module = _module(kernel, variant)
        self._failures: dict[tuple[int, torch.dtype, bool], str | None] = {}
        self._dtypes: set[torch.dtype] = set()  # since the last report, as are the next two
        self._lacked: set[str] = set()
        self._took_calls = False

    def attend(self, q_BQHD, k_BKhD, v_BKhD, mask_BK, scale):
        module = self._for(q_BQHD, k_BKhD, mask_BK, lse=False)
        return module.attend(q_BQHD, *_for_each_head(q_BQHD, k_BKhD, v_BKhD), mask_BK, scale)

    def attend_lse(self, q_BQHD, k_BKhD, v_BKhD, mask_BK, scale):
        module = self._for(q_BQHD, k_BKhD, mask_BK, lse=True)
        return module.attend_lse(q_BQHD, *_for_each_head(q_BQHD, k_BKhD, v_BKhD), mask_BK, scale)

    def leave(self, dtype: torch.dtype, calls: str) -> None:
        """Record a call with queries of `dtype` that torch's kernel computes instead. `calls`: its kind, as text for the
        report."""
        self._dtypes.add(dtype)
        if self.kernel.name != SDPA:
            self._lacked.add(calls)

    def failure(self, head_size: int, dtype: torch.dtype, lse: bool = False) -> str | None:
        """Return why the kernel does not support calls with this head size and dtype. None: it does."""
        if lse and not self.kernel.lse:
            return "it returns no log-sum-exp"
        key = head_size, dtype, lse
        if key not in self._failures:
            self._failures[key] = failure = trial(self.kernel, self._device, dtype, head_size, lse, self._variant)
            if failure is not None:
                form = " with a log-sum-exp" if lse else ""
                log.warning("%s: heads of %d in %s%s: %s", self.kernel.title, head_size, _name(dtype), form, failure)
        return self._failures[key]

    @property
    def used(self) -> bool:
        """Whether a call has come since the last report."""
        return bool(self._dtypes)

    def report(self) -> str:
        """The kernels that ran since the last report, as text for the user. Empty on CPUs, which have only one kernel."""
        dtypes, lacked, took = sorted(map(_name, self._dtypes)), sorted(self._lacked), self._took_calls
        self._dtypes, self._lacked, self._took_calls = set(), set(), False
        if self._device.type != "cuda":
            return ""
        words = f" in {' and '.join(dtypes)}" if dtypes else ""
        if lacked and not took:
            text = f"{KERNELS[SDPA].title}{words}: {self.kernel.title} cannot take {', '.join(lacked)}"
        else:
            text = self.kernel.title + words + (f", and {KERNELS[SDPA].title} for {', '.join(lacked)}" if lacked else "")
        text += f", since {self._refused}" if self._refused else ""
        return text + (", on ROCm, where Parallel DiT has never been tried" if torch.version.hip else "")

    def _for(self, q_BQHD: torch.Tensor, k_BKhD: torch.Tensor, mask_BK: torch.Tensor | None, lse: bool) -> Any:
        """Return the kernel's module, or SDPA's if the kernel does not support this call."""
        if not q_BQHD.numel() or not k_BKhD.numel():
            return sdpa
        self._dtypes.add(q_BQHD.dtype)
        lacks = self._lacks(q_BQHD, mask_BK, lse)
        if lacks:
            self._lacked.add(lacks)
            return sdpa
        self._took_calls = True
        return self._module

    def _lacks(self, q_BQHD: torch.Tensor, mask_BK: torch.Tensor | None, lse: bool) -> str:
        """Return why the kernel does not support this call, as text for the report. Empty: it does."""
        if self.kernel.name == SDPA:
            return ""
        size, dtype = q_BQHD.shape[-1], q_BQHD.dtype
        if mask_BK is not None and not self.kernel.masks:
            return "calls with a mask"
        if self.failure(size, dtype) is not None:
            return f"heads of {size} in {_name(dtype)}"
        return "calls that need a log-sum-exp" if lse and self.failure(size, dtype, lse=True) is not None else ""


def choose_kernel(attention: str, device: torch.device, dtype: str, head_size: int = 64, ring: bool = False) -> RankKernel:
    """Return the kernel for the setting `attention` (core/attention_kernels.py), for weights of dtype `dtype`.

    If a preferred kernel does not run here, SDPA is chosen. Raises ValueError if a demanded kernel does not run here, or if
    `ring` is true and no kernel returns the log-sum-exp.
    """
    kernel, demanded = wanted(attention)
    compute = compute_dtype(dtype, device)
    chosen, failure = RankKernel(kernel, device, variant=variant_of(attention)), None
    if kernel.name != SDPA:
        if not kernel.possible(str(device), dtype):
            failure = "is not installed here or cannot serve this device and dtype"
            log.warning("%s %s", kernel.title, failure)
        elif reason := chosen.failure(head_size, compute):
            failure = f"failed a trial ({reason})"
        if failure and demanded:
            raise ValueError(f"attention is '{attention}', but {kernel.title} {failure}. Use 'auto' or 'sdpa'.")
        if failure:
            chosen = RankKernel(KERNELS[SDPA], device, f"{kernel.title} {failure}")
    if ring and device.type == "cuda" and chosen.failure(head_size, compute, lse=True) is not None:
        wrong = trial(KERNELS[SDPA], device, compute, head_size, lse=True)
        if wrong is not None:
            where = f"{torch.cuda.get_device_name(device)} in {compute_name(dtype)}"
            raise ValueError(
                "Set ring_degree to 1 and use ulysses_degree: ring_degree needs attention with its log-sum-exp, but "
                f"torch's kernels for {where} do not give it ({wrong})."
            )
    return chosen


def trial(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_size: int, lse: bool, variant: str = ""
) -> str | None:
    """Why a kernel cannot be used for heads of this size. None: its results equal those of SDPA on the CPU in fp32. Queries,
    keys and values have the strides that Ulysses' all-to-all leaves. Masks are tried too, if the kernel takes masks."""
    count = TRIAL_KEYS * 3 * len(TRIAL_SEEN) * TRIAL_HEADS * head_size
    rows_K3BHD = torch.arange(count).sin().view(TRIAL_KEYS, 3, len(TRIAL_SEEN), TRIAL_HEADS, head_size)
    seen_BK = torch.arange(TRIAL_KEYS)[None] < torch.tensor(TRIAL_SEEN)[:, None]
    for mask_BK in (None, seen_BK) if kernel.masks else (None,):
        expected = sdpa.attend_lse(*_queries_keys_values(rows_K3BHD), mask_BK, None)
        try:
            tried_K3BHD = rows_K3BHD.to(device, dtype, copy=True)
            arguments = *_queries_keys_values(tried_K3BHD), None if mask_BK is None else mask_BK.to(device), None
            module = _module(kernel, variant)
            results = module.attend_lse(*arguments) if lse else (module.attend(*arguments),)
            results = [part.float().cpu() for part in results]  # waits: CUDA raises a failed launch at the next wait
            unchanged = torch.equal(tried_K3BHD, rows_K3BHD.to(device, dtype))
        except Exception as error:  # whatever a foreign package's import or first call may raise
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:LONGEST_REASON]
        if not unchanged:
            return "it changes its arguments"
        for part, right in zip(results, expected, strict=False):  # `expected` has a log-sum-exp in any case
            if part.shape != right.shape or not torch.allclose(part, right, atol=TOLERANCE, rtol=TOLERANCE):
                return "its results are wrong"
    return None


def _queries_keys_values(rows_K3BHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of `rows_K3BHD`: queries [B, Q, H, D], keys and values [B, K, H, D]."""
    q_BKHD, k_BKHD, v_BKHD = (rows_K3BHD[:, index].transpose(0, 1) for index in range(3))
    return q_BKHD[:, :TRIAL_QUERIES], k_BKHD, v_BKHD


def _module(kernel: AttentionKernel, variant: str) -> Any:
    """Return the object with the kernel's `attend`, and with `attend_lse` if the kernel returns the log-sum-exp."""
    module = importlib.import_module(f".kernels.{kernel.name}", __package__)
    return module.Variant(variant) if variant else module


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))


def _for_each_head(q_BQHD: torch.Tensor, *shared_BKhD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return keys and values [B, K, H, D], with each of their h heads repeated for the query heads that share it."""
    times = q_BQHD.shape[2] // shared_BKhD[0].shape[2]
    return shared_BKhD if times == 1 else tuple(x.repeat_interleave(times, dim=2) for x in shared_BKhD)
