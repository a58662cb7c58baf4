"""Which devices ranks get, and what is said where ComfyUI shows too few GPUs or runs on something else."""

import sys

import pytest

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.device_choice import Host, choose_devices, gpus_of, named_devices, possible_devices, why_hidden
from testing.fake_cuda import AMPERE, fake_cuda

TWO = Degrees(pipe=2)


def test_auto_takes_the_first_gpus():
    with fake_cuda(AMPERE, AMPERE, AMPERE):
        assert choose_devices("auto", TWO, Host()) == ("cuda:0", "cuda:1")
        assert possible_devices("", Host()) == ("cuda:0", "cuda:1", "cuda:2")
        assert choose_devices("cuda:2,cuda:2", TWO, Host()) == ("cuda:2", "cuda:2")


def test_comfyui_on_the_cpu_means_cpu_ranks_even_beside_gpus():
    on_cpu = Host(kind="cpu")
    with fake_cuda(AMPERE, AMPERE):
        assert choose_devices("auto", TWO, on_cpu) == ("cpu", "cpu")
        assert possible_devices("auto", on_cpu) == ("cpu",)
        assert gpus_of(on_cpu) == ()
        assert choose_devices("cuda:0,cuda:1", TWO, on_cpu) == ("cuda:0", "cuda:1")  # asked for by name


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("mps", r"an Apple GPU \(MPS\)"),
        ("xpu", r"an Intel GPU \(XPU\)"),
        ("privateuseone", "DirectML"),
    ],
)
def test_other_accelerators_are_refused_by_name_and_never_become_cpu_ranks(kind, what):
    host = Host(kind=kind)
    for choose in (lambda: choose_devices("auto", TWO, host), lambda: possible_devices("auto", host)):
        with pytest.raises(ValueError, match=rf"^devices: ComfyUI runs on {what} here.*Load Diffusion Model.*write cpu"):
            choose()
    assert choose_devices("cpu,cpu", TWO, host) == ("cpu", "cpu")
    assert gpus_of(host) == ()
    assert why_hidden(host, {"CUDA_VISIBLE_DEVICES": "0"}) == ""


def test_their_names_are_refused_too():
    with fake_cuda(AMPERE):
        with pytest.raises(ValueError, match=r"^devices: xpu:1 is an Intel GPU \(XPU\), on which ranks cannot run"):
            named_devices("xpu:1,cuda:0", Host())
        with pytest.raises(ValueError, match=r"^devices: 'tpu' is not a device of this machine, which has cpu, cuda:0\.$"):
            named_devices("tpu", Host())


def test_without_a_gpu_errors_say_how_ranks_run_on_the_cpu():
    with fake_cuda():
        for choose in (lambda: choose_devices("auto", TWO, Host()), lambda: named_devices("cuda:0", Host())):
            with pytest.raises(ValueError, match=r"^devices: .*Write cpu,cpu into devices"):
                choose()


def test_gpus_beside_cpus_are_refused_where_ulysses_may_run():
    """Their ranks would exchange heads in different numbers of groups, and wait for ever."""
    mixed = r"^Set devices to GPUs only, or to cpu once for each rank: .* \(cuda:0, cpu\)"
    with fake_cuda(AMPERE):
        assert choose_devices("cuda:0,cpu", TWO, Host()) == ("cuda:0", "cpu")
        for degrees, devices in ((Degrees(ulysses=2), "cuda:0,cpu"), (Degrees(ulysses=2, pipe=2), "cpu,cpu:1,cpu,cuda:0")):
            with pytest.raises(ValueError, match=r"^Set devices to GPUs only, .*set ulysses_degree to 1"):
                choose_devices(devices, degrees, Host())
        with pytest.raises(ValueError, match=mixed):
            possible_devices("cuda:0, cpu", Host())
        assert choose_devices("cpu,cpu:1", Degrees(ulysses=2), Host()) == ("cpu", "cpu:1")


WINDOWS_DEFAULT = {"CUDA_VISIBLE_DEVICES": "0"}
"""What ComfyUI sets there by itself."""


@pytest.mark.parametrize(
    ("platform", "host", "environment", "said"),
    [
        (
            "win32",
            Host(),
            WINDOWS_DEFAULT,
            " On Windows ComfyUI shows the first GPU only, unless it is started with --cuda-device all "
            "--disable-pinned-memory.",
        ),
        (
            "linux",
            Host(cuda_device="0"),
            {"CUDA_VISIBLE_DEVICES": "0"},
            " ComfyUI was started with --cuda-device 0, which hides all other GPUs: restart it with --cuda-device all.",
        ),
        (
            "linux",
            Host(),
            {"CUDA_VISIBLE_DEVICES": "1"},
            " CUDA_VISIBLE_DEVICES is '1' in ComfyUI's environment, which hides all other GPUs: remove it, or list the "
            "numbers of all in it, such as 0,1, and restart ComfyUI.",
        ),
        ("win32", Host(cuda_device="all"), {}, ""),
        ("linux", Host(), {}, ""),
    ],
)
def test_how_hidden_gpus_are_shown(monkeypatch, platform, host, environment, said):
    monkeypatch.setattr(sys, "platform", platform)
    assert why_hidden(host, environment) == said


def test_errors_about_too_few_gpus_say_how_hidden_ones_are_shown(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "platform", "win32")
    shown = r".*--cuda-device all --disable-pinned-memory\."
    with fake_cuda(AMPERE):
        with pytest.raises(
            ValueError,
            match=rf"^devices: Lower .* pipefusion_degree 2 needs 2 GPUs, but ComfyUI shows 1 on this machine\.{shown}$",
        ):
            choose_devices("auto", TWO, Host())
        with pytest.raises(ValueError, match=f"^devices: 'cuda:1' is not a device of this machine{shown}$"):
            choose_devices("cuda:0,cuda:1", TWO, Host())
