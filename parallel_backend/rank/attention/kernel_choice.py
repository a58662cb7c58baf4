"""Which attention kernel a rank takes, and which of its calls go to SDPA instead.

A kernel has to compute once on this device first: a wheel that is installed may be for another torch or another GPU, which
shows at its first call only.
"""

import importlib
import logging
from types import ModuleType

import torch

from parallel_backend.core.attention_kernels import KERNELS, SDPA, AttentionKernel, wanted
from parallel_backend.core.dtypes import compute_dtype, compute_name

from .kernels import sdpa

log = logging.getLogger(__name__)

TRIAL_QUERIES, TRIAL_KEYS, TRIAL_HEADS = 45, 77, 3
"""No multiples of any kernel's tile, and no two alike."""
TRIAL_SEEN = (20, TRIAL_KEYS)
"""Keys that the mask leaves to the trial's two entries."""
TOLERANCE = 0.05
"""Between a half-precision or quantising kernel and the formula in fp32, on values within 1."""
LONGEST_REASON = 200
"""Characters."""


class RankKernel:
    """A rank's attention: by one kernel, and by SDPA what that cannot take.

    Tried once for each head size and dtype, with the log-sum-exp apart. `attend` and `attend_lse`: see kernels/interface.py;
    besides, several query heads in a row may share one of the keys and values.
    """

    def __init__(self, kernel: AttentionKernel, device: torch.device, refused: str = ""):
        """`refused`: why it is not the kernel that was wished for, in words of the report."""
        self.kernel, self._device, self._refused = kernel, device, refused
        self._module = _module(kernel)
        self._failures: dict[tuple[int, torch.dtype, bool], str | None] = {}
        self._dtypes: set[str] = set()  # since the last report, as are the next two
        self._lacked: set[str] = set()
        self._took_calls = False

    def attend(self, q, k, v, mask, scale):
        return self._for(q, k, mask, lse=False).attend(q, *_for_each_head(q, k, v), mask, scale)

    def attend_lse(self, q, k, v, mask, scale):
        return self._for(q, k, mask, lse=True).attend_lse(q, *_for_each_head(q, k, v), mask, scale)

    def failure(self, head_size: int, dtype: torch.dtype, lse: bool = False) -> str | None:
        """Why it does not take such calls; None if it does."""
        key = head_size, dtype, lse
        if key not in self._failures:
            self._failures[key] = failure = trial(self.kernel, self._device, dtype, head_size, lse)
            if failure is not None:
                form = " with a log-sum-exp" if lse else ""
                log.warning("%s: heads of %d in %s%s: %s", self.kernel.title, head_size, _name(dtype), form, failure)
        return self._failures[key]

    def report(self) -> str:
        """What computed since the last report. Empty on CPUs, which have one kernel."""
        dtypes, lacked, took = sorted(self._dtypes), sorted(self._lacked), self._took_calls
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

    def _for(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, lse: bool) -> ModuleType:
        """The module that takes this call."""
        if not q.numel() or not k.numel():
            return sdpa
        self._dtypes.add(_name(q.dtype))
        lacks = self._lacks(q, mask, lse)
        if lacks:
            self._lacked.add(lacks)
            return sdpa
        self._took_calls = True
        return self._module

    def _lacks(self, q: torch.Tensor, mask: torch.Tensor | None, lse: bool) -> str:
        """Why this call is not the kernel's, in words of the report. Empty: it is."""
        if self.kernel.name == SDPA:
            return ""
        if mask is not None and not self.kernel.masks:
            return "calls with a mask"
        if self.failure(q.shape[-1], q.dtype) is not None:
            return f"heads of {q.shape[-1]} in {_name(q.dtype)}"
        return "calls that need a log-sum-exp" if lse and self.failure(q.shape[-1], q.dtype, lse=True) is not None else ""


def choose_kernel(attention: str, device: torch.device, dtype: str, head_size: int = 64, ring: bool = False) -> RankKernel:
    """The kernel for an `attention` (core/attention_kernels.py), heads of this size and weights of dtype `dtype`.

    What is wished for and does not run here gives way to SDPA. With `ring` there has to be a log-sum-exp too. ValueError
    for a demanded kernel that does not run here, and for a ring without log-sum-exp.
    """
    kernel, demanded = wanted(attention)
    compute = compute_dtype(dtype, device)
    chosen, failure = RankKernel(kernel, device), None
    if kernel.name != SDPA:
        if not kernel.possible(str(device), dtype):
            failure = "is not installed here or cannot serve this device and dtype"
            log.warning("%s %s", kernel.title, failure)
        elif found := chosen.failure(head_size, compute):
            failure = f"failed a trial ({found})"
        if failure and demanded:
            raise ValueError(f"attention is '{attention}', but {kernel.title} {failure}. Use 'auto' or 'sdpa'.")
        if failure:
            chosen = RankKernel(KERNELS[SDPA], device, f"{kernel.title} {failure}")
    if ring and device.type == "cuda" and chosen.failure(head_size, compute, lse=True) is not None:
        wrong = trial(KERNELS[SDPA], device, compute, head_size, lse=True)
        if wrong is not None:
            where = f"{torch.cuda.get_device_name(device)} in {compute_name(dtype)}"
            raise ValueError(
                f"ring_degree needs attention with its log-sum-exp, and torch's kernels for {where} do not give it "
                f"({wrong}). Set ring_degree to 1 and use ulysses_degree."
            )
    return chosen


def trial(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_size: int, lse: bool) -> str | None:
    """Why a kernel cannot be used for heads of this size; None if it computes what the formula says.

    On queries, keys and values strided as they come out of an all-to-all, with a mask where the kernel takes masks.
    """
    count = TRIAL_KEYS * 3 * len(TRIAL_SEEN) * TRIAL_HEADS * head_size
    rows = torch.arange(count).sin().view(TRIAL_KEYS, 3, len(TRIAL_SEEN), TRIAL_HEADS, head_size)
    some = torch.arange(TRIAL_KEYS)[None] < torch.tensor(TRIAL_SEEN)[:, None]
    for mask in (None, some) if kernel.masks else (None,):
        expected = sdpa.attend_lse(*_queries_keys_values(rows), mask, None)
        try:
            here = rows.to(device, dtype, copy=True)
            arguments = *_queries_keys_values(here), None if mask is None else mask.to(device), None
            module = _module(kernel)
            found = module.attend_lse(*arguments) if lse else (module.attend(*arguments),)
            found = [part.float().cpu() for part in found]  # waits: a kernel that cannot run says so now
            unchanged = torch.equal(here, rows.to(device, dtype))
        except Exception as error:  # whatever a foreign package's import or first call may raise
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:LONGEST_REASON]
        if not unchanged:
            return "it changes its arguments"
        for part, right in zip(found, expected, strict=False):
            if part.shape != right.shape or not torch.allclose(part, right, atol=TOLERANCE, rtol=TOLERANCE):
                return "its results are wrong"
    return None


def _queries_keys_values(rows: torch.Tensor) -> list[torch.Tensor]:
    """[keys, 3, B, H, D] -> [B, queries, H, D] and two of [B, keys, H, D], all views of it."""
    q, k, v = (rows[:, index].transpose(0, 1) for index in range(3))
    return [q[:, :TRIAL_QUERIES], k, v]


def _module(kernel: AttentionKernel) -> ModuleType:
    return importlib.import_module(f".kernels.{kernel.name}", __package__)


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))


def _for_each_head(q: torch.Tensor, *shared: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, k, h, D] of heads that several query heads share -> [B, k, H, D]."""
    times = q.shape[2] // shared[0].shape[2]
    return shared if times == 1 else tuple(x.repeat_interleave(times, dim=2) for x in shared)
