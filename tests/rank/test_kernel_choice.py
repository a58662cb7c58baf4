"""Which attention kernel a rank takes: by card, dtype and what is installed, and after a trial of flash-attn."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.attention import kernel_choice
from parallel_backend.rank.attention.kernel_choice import FLASH, SDPA, choose_kernel, trial
from parallel_backend.rank.attention.kernels import Kernel, sdpa, sdpa_lse
from parallel_backend.wire.sampling import RunStats
from tests.support.fake_cuda import ADA, AMPERE, BLACKWELL, PASCAL, RDNA3, TURING, Card, fake_cuda

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture
def trials(monkeypatch):
    """`trials[kernel]`: what that kernel's trial says from now on; every call is in `trials["called"]`."""
    said = {"flash": None, "sdpa": None, "called": []}

    def answer(kernel, device, dtype, head_size):
        said["called"].append((kernel.name, str(device), dtype, head_size))
        return said[kernel.name]

    monkeypatch.setattr(kernel_choice, "trial", answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return said


@pytest.mark.parametrize(
    ("card", "dtype", "kernel", "said"),
    [
        (PASCAL, "bf16/fp32", "sdpa", "torch SDPA in fp32"),
        (TURING, "fp16", "sdpa", "torch SDPA in fp16"),
        (AMPERE, "bf16", "flash", "flash-attn in bf16"),
        (AMPERE, "fp32", "sdpa", "torch SDPA in fp32"),
        (ADA, "fp8_e4m3fn", "flash", "flash-attn in bf16"),
        (ADA, "fp8_e4m3fn/fp16", "flash", "flash-attn in fp16"),
        (BLACKWELL, "bf16", "flash", "flash-attn in bf16"),
        (RDNA3, "bf16", "flash", "flash-attn in bf16 on ROCm, where Parallel DiT has never been tried"),
    ],
    ids=lambda value: value.name if isinstance(value, Card) else None,
)
def test_auto_by_card_and_dtype(trials, card, dtype, kernel, said):
    with fake_cuda(card):
        chosen = choose_kernel("auto", CUDA, dtype, 128)
    assert (chosen.name, chosen.said) == (kernel, said)
    assert trials["called"] == ([("flash", "cuda:0", dtype, 128)] if kernel == "flash" else [])


def test_a_wheel_that_fails_its_trial_is_not_taken_and_the_report_says_so(trials):
    trials["flash"] = "ImportError: undefined symbol"
    with fake_cuda(AMPERE):
        chosen = choose_kernel("auto", CUDA, "bf16")
        assert chosen.name == "sdpa"
        assert chosen.said == "torch SDPA, since flash-attn failed a trial (ImportError: undefined symbol) in bf16"
        assert choose_kernel("sdpa", CUDA, "bf16").said == "torch SDPA in bf16"
        with pytest.raises(ValueError, match=r"^attention is 'flash', but flash-attn failed its trial: ImportError: undef"):
            choose_kernel("flash", CUDA, "bf16")
    stats = [RunStats(rank, 1, 1, 1.0, 0.0, 0.0, {}, 0, 0, attention=chosen.said) for rank in range(2)]
    report = str(RunReport(Degrees(pipe=2), 1, 1, 1.0, None, None, tuple(stats)))
    assert report.count(f"attention: {chosen.said}") == 1


def test_without_flash_attn_nothing_is_tried(trials, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with fake_cuda(AMPERE):
        assert choose_kernel("auto", CUDA, "bf16").said == "torch SDPA in bf16"
        with pytest.raises(ValueError, match="is not installed here"):
            choose_kernel("flash", CUDA, "bf16")
    assert trials["called"] == []


def test_the_ring_is_refused_where_torch_gives_no_log_sum_exp(trials):
    trials["sdpa"] = "RuntimeError: no kernel image is available"
    with fake_cuda(TURING):
        assert choose_kernel("auto", CUDA, "fp16").name == "sdpa"
        with pytest.raises(ValueError, match=r"^ring_degree .* RTX 2080 Ti in fp16 .*no kernel image.*ulysses_degree"):
            choose_kernel("auto", CUDA, "fp16", ring=True)
        trials["sdpa"] = None
        assert choose_kernel("auto", CUDA, "fp16", ring=True).name == "sdpa"


def test_cpus_have_one_kernel_and_no_words_about_it(trials):
    assert choose_kernel("auto", CPU, "fp32", ring=True) is SDPA
    assert trials["called"] == [] and SDPA.said == ""


@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_kernel_that_computes_what_the_formula_says_passes(dtype, head_size):
    assert trial(SDPA, CPU, dtype, head_size) is None


def test_kernels_that_fail_or_compute_something_else_do_not_pass(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it could not be imported
    assert trial(FLASH, CPU, "fp32", 16).startswith("ModuleNotFoundError: ")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())  # a wheel of another version
    assert trial(FLASH, CPU, "fp32", 16).startswith("ImportError: cannot import name 'flash_attn_func'")
    wrong = "its results are wrong"
    assert trial(Kernel("x", lambda *a: 2 * sdpa(*a), sdpa_lse), CPU, "fp32", 16) == wrong
    assert trial(Kernel("x", sdpa, lambda *a: (sdpa(*a), sdpa_lse(*a)[1] + 1)), CPU, "fp32", 16) == wrong
    assert trial(Kernel("x", sdpa, lambda *a: (sdpa(*a), sdpa_lse(*a)[1] * torch.nan)), CPU, "fp32", 16) == wrong
