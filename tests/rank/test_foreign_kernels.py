"""Kernels of other packages, on stand-ins with the packages' signatures: called rightly, left where they do not serve."""

from pathlib import Path

import pytest
import torch

from parallel_backend.core.attention_kernels import ATTENTION, KERNELS
from parallel_backend.rank.attention import kernels
from parallel_backend.rank.attention.kernel_choice import RankKernel, trial
from parallel_backend.rank.attention.kernels import sdpa
from tests.support.attention_packages import LOG2_E, PACKAGES, WITHOUT_LSE, exactly, install

CPU = torch.device("cpu")
SCALE = 0.3


@pytest.fixture(params=PACKAGES)
def package(request, monkeypatch) -> str:
    """Name in PACKAGES of what is installed."""
    _, module, functions = PACKAGES[request.param]
    install(monkeypatch, module, **functions)
    return request.param


def problem(head_size: int = 64):
    """Views of another tensor, as all-to-alls and the K/V buffer give them."""
    rows = torch.randn(9, 3, 2, 4, head_size, generator=torch.Generator().manual_seed(0))
    q, k, v = (rows[:, i].transpose(0, 1) for i in range(3))
    return q[:, :5], k, v


def on_a_gpu(name: str) -> RankKernel:
    """The kernel, tried and called on the CPU, which reports as on a GPU."""
    kernel = RankKernel(KERNELS[name], CPU)
    kernel._device = torch.device("cuda:0")
    kernel.failure = lambda size, dtype, lse=False: trial(KERNELS[name], CPU, dtype, size, lse)
    return kernel


def assert_equal(found, expected):
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape
        assert torch.allclose(one, two, atol=1e-5)


def test_every_row_has_its_module_and_every_module_its_row():
    modules = {path.stem for path in Path(kernels.__file__).parent.glob("*.py")} - {"__init__", "interface"}
    assert modules == set(KERNELS)
    assert ATTENTION[:3] == ("auto", "sdpa", "flash")  # saved workflows name these


@pytest.mark.parametrize("scale", [None, SCALE])
def test_a_kernel_computes_attention_and_its_log_sum_exp(package, scale):
    kernel, given = on_a_gpu(PACKAGES[package][0]), problem()
    expected = sdpa.attend_lse(*given, None, scale)
    assert_equal([kernel.attend(*given, None, scale)], expected[:1])
    assert kernel.report() == f"{kernel.kernel.title} in fp32"
    assert_equal(kernel.attend_lse(*given, None, scale), expected)
    sdpa_took = package in WITHOUT_LSE
    said = f"torch SDPA in fp32: {kernel.kernel.title} cannot take calls that need a log-sum-exp"
    assert kernel.report() == (said if sdpa_took else f"{kernel.kernel.title} in fp32")


def test_a_mask_goes_to_sdpa_where_the_kernel_takes_none(package):
    kernel, given = on_a_gpu(PACKAGES[package][0]), problem()
    mask = torch.arange(9)[None] < torch.tensor([[4], [9]])
    kernel.attend(*given, None, SCALE)
    assert_equal([kernel.attend(*given, mask, SCALE)], sdpa.attend_lse(*given, mask, SCALE)[:1])
    assert_equal(kernel.attend_lse(*given, mask, SCALE), sdpa.attend_lse(*given, mask, SCALE))
    title = kernel.kernel.title
    lacks = "calls that need a log-sum-exp" if kernel.kernel.masks else "calls with a mask"
    assert kernel.report() == f"{title} in fp32, and torch SDPA for {lacks}"


def _sage_that(change):
    """sageattn of release 2 with a fault."""

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, smooth_k=True):
        out, lse = change(q, k, v, *exactly(q, k, v, sm_scale))
        return (out, lse) if return_lse else out

    return sageattn


def _writes(q, k, v, out, lse):
    k -= k.mean(1, keepdim=True)
    return out, lse


@pytest.mark.parametrize(
    ("change", "attend", "attend_lse"),
    [
        (lambda q, k, v, out, lse: (out, lse), None, None),
        (lambda q, k, v, out, lse: (out, lse * LOG2_E), None, "its results are wrong"),  # to base 2
        (lambda q, k, v, out, lse: (out, lse.transpose(1, 2)), None, "its results are wrong"),
        (lambda q, k, v, out, lse: (out.transpose(1, 2), lse), "its results are wrong", "its results are wrong"),
        (lambda q, k, v, out, lse: (2 * out, lse), "its results are wrong", "its results are wrong"),
        (lambda q, k, v, out, lse: (out, lse * torch.nan), None, "its results are wrong"),
        (_writes, "it changes its arguments", "it changes its arguments"),
    ],
    ids=["right", "base 2", "lse heads last", "heads first", "twice", "nan", "in place"],
)
def test_a_kernel_that_computes_something_else_does_not_pass_its_trial(monkeypatch, change, attend, attend_lse):
    install(monkeypatch, "sageattention", sageattn=_sage_that(change))
    assert trial(KERNELS["sage"], CPU, torch.float32, 64, lse=False) == attend
    assert trial(KERNELS["sage"], CPU, torch.float32, 64, lse=True) == attend_lse


def test_a_package_that_is_not_there_or_lacks_the_function_does_not_pass(monkeypatch):
    missing = trial(KERNELS["xformers"], CPU, torch.float32, 64, lse=False)
    assert missing.startswith("ModuleNotFoundError: ")
    install(monkeypatch, "flash_attn")
    assert trial(KERNELS["flash"], CPU, torch.float32, 64, lse=False).startswith("ImportError: cannot import name 'flash_")
