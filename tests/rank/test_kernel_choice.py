"""Which attention kernel a rank takes: by what is asked for, card, dtype and what is installed, and after a trial."""

import importlib.util

import pytest
import torch

from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.core.attention_kernels import KERNELS, as_wish, wanted
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.validate import check_attention
from parallel_backend.rank.attention import kernel_choice
from parallel_backend.rank.attention.kernel_choice import choose_kernel
from parallel_backend.wire.sampling import RunStats
from testing.fake_cuda import ADA, AMPERE, PASCAL, RDNA3, TURING, Card, fake_cuda

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture
def trials(monkeypatch):
    """`trials[kernel]`: what that kernel's trial says from now on; every call is in `trials["called"]`."""
    said = {"called": []}

    def answer(kernel, device, dtype, head_size, lse, variant=""):
        said["called"].append((kernel.name, str(device), dtype, head_size, lse))
        return said.get(kernel.name)

    monkeypatch.setattr(kernel_choice, "trial", answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return said


def test_a_wish_and_a_demand():
    assert wanted("auto") == (KERNELS["sdpa"], False)
    assert wanted("sage") == (KERNELS["sage"], True)
    assert wanted("auto/sage") == (KERNELS["sage"], False) == wanted(as_wish("sage"))
    assert as_wish("sdpa") == "auto"


@pytest.mark.parametrize(
    ("card", "dtype", "wish", "kernel"),
    [
        (PASCAL, "bf16/fp32", "flash", "sdpa"),
        (PASCAL, "fp32", "xformers", "xformers"),
        (TURING, "fp16", "sage", "sage"),
        (AMPERE, "bf16", "flash", "flash"),
        (AMPERE, "fp32", "sage", "sdpa"),
        (ADA, "fp8_e4m3fn", "sage", "sage"),
        (RDNA3, "bf16", "flash", "flash"),
    ],
    ids=lambda value: value.name if isinstance(value, Card) else None,
)
def test_a_wish_by_card_and_dtype(trials, card, dtype, wish, kernel):
    with fake_cuda(card):
        assert choose_kernel(f"auto/{wish}", CUDA, dtype, 128).kernel.name == kernel
        compute = {"bf16/fp32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8_e4m3fn": torch.bfloat16}
        tried = (kernel, "cuda:0", compute.get(dtype, torch.float16), 128, False)
        assert trials["called"] == ([tried] if kernel == wish else [])
        if kernel == wish:
            check_attention(wish, ("cuda:0",), dtype)
        else:
            with pytest.raises(ValueError, match=f"^attention is '{wish}', but .* cannot run here: it needs the package"):
                check_attention(wish, ("cuda:0",), dtype)


def test_a_wheel_that_fails_its_trial_is_not_taken_and_the_report_says_so(trials):
    trials["flash"] = "ImportError: undefined symbol"
    with fake_cuda(AMPERE):
        chosen = choose_kernel("auto/flash", CUDA, "bf16")
        assert chosen.kernel.name == "sdpa"
        said = chosen.report()
        assert said == "torch SDPA, since flash-attn failed a trial (ImportError: undefined symbol)"
        with pytest.raises(ValueError, match=r"^attention is 'flash', but flash-attn failed a trial \(ImportError: undef"):
            choose_kernel("flash", CUDA, "bf16")
    stats = [RunStats(rank, 1, 1, 1.0, 0.0, 0.0, {}, 0, 0, attention=said) for rank in range(2)]
    report = str(RunReport(Degrees(pipe=2), 1, 1, 1.0, None, None, tuple(stats)))
    assert report.count(f"attention: {said}") == 1


def test_without_its_package_nothing_is_tried(trials, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with fake_cuda(AMPERE):
        said = choose_kernel("auto/sage", CUDA, "bf16").report()
        assert said == "torch SDPA, since SageAttention is not installed here or cannot serve this device and dtype"
        with pytest.raises(ValueError, match="is not installed here"):
            choose_kernel("sage", CUDA, "bf16")
    assert trials["called"] == []


def test_the_ring_is_refused_where_no_kernel_gives_a_log_sum_exp(trials):
    trials["sdpa"] = "RuntimeError: no kernel image is available"
    with fake_cuda(TURING):
        assert choose_kernel("auto", CUDA, "fp16").kernel.name == "sdpa"
        with pytest.raises(ValueError, match=r"^Set ring_degree to 1 .* RTX 2080 Ti in fp16 .*no kernel image"):
            choose_kernel("auto", CUDA, "fp16", ring=True)
        assert choose_kernel("auto/xformers", CUDA, "fp16", ring=True).kernel.name == "xformers"
        trials["sdpa"] = None
        assert choose_kernel("auto", CUDA, "fp16", ring=True).kernel.name == "sdpa"


def test_cpus_have_one_kernel_and_no_words_about_it(trials):
    chosen = choose_kernel("auto/sage", CPU, "fp32", ring=True)
    assert chosen.kernel is KERNELS["sdpa"]
    assert trials["called"] == [] and chosen.report() == ""
