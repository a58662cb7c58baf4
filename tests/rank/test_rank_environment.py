"""What ranks have in their environment otherwise than ComfyUI, before torch is imported."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend.core.devices import in_its_process
from parallel_backend.rank.start.environment import set_rank_environment

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
ASYNC, SEGMENTS = "backend:cudaMallocAsync", "expandable_segments:True"


def after(given: dict[str, str], device: str = "cuda:0") -> dict[str, str]:
    environment = dict(given)
    set_rank_environment(device, environment)
    return environment


@pytest.fixture
def on(monkeypatch):
    """`on(platform)`: as if this were it, with a CUDA build of torch unless `rocm`, under WSL if `wsl`."""

    def pretend(name: str, rocm: bool = False, wsl: bool = False) -> None:
        release = "6.6.87-microsoft-standard-WSL2" if wsl else "6.8.0-generic"
        monkeypatch.setattr(sys, "platform", name)
        monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(release=release))
        monkeypatch.setattr(importlib.metadata, "version", lambda _name: f"2.13.0+{'rocm7.0' if rocm else 'cu130'}")

    return pretend


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {OLD: SEGMENTS}),
        ({OLD: ASYNC}, {OLD: SEGMENTS}),  # as ComfyUI sets it
        ({OLD: f"max_split_size_mb:512,{ASYNC}"}, {OLD: f"max_split_size_mb:512,{SEGMENTS}"}),
        ({OLD: f"expandable_segments:False,{ASYNC}"}, {OLD: "expandable_segments:False"}),  # the user's own choice
        ({NEW: "max_split_size_mb:64", OLD: ASYNC}, {NEW: f"max_split_size_mb:64,{SEGMENTS}"}),
    ],
)
def test_ranks_set_their_own_allocator_and_keep_what_the_user_has_set(on, given, expected):
    on("linux")
    assert after(given) == expected


@pytest.mark.parametrize("where", [{"name": "win32"}, {"name": "linux", "rocm": True}, {"name": "linux", "wsl": True}])
def test_expandable_segments_are_left_where_they_are_not_supported(on, where):
    on(**where)
    visible = {"CUDA_VISIBLE_DEVICES": "0"} if where["name"] == "win32" else {}
    assert after({OLD: f"{ASYNC},max_split_size_mb:64"}) == {OLD: "max_split_size_mb:64"} | visible
    assert after({OLD: ASYNC}) == visible


def test_a_cpu_ranks_environment_is_left_alone(on):
    on("win32")
    assert after({OLD: ASYNC}, "cpu") == after({OLD: ASYNC}, "ray:cpu") == {OLD: ASYNC}


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5,GPU-7"}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-7"}),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"},
            "cuda:1",
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
        ),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "ray:cuda", {"CUDA_VISIBLE_DEVICES": "3"}),  # Ray has done it
    ],
)
def test_on_windows_a_rank_sees_its_own_gpu_only(on, given, device, expected):
    on("win32")
    assert after(given, device) == expected
    assert in_its_process(device) == "cuda:0"


def test_elsewhere_a_rank_sees_all_gpus_by_their_own_numbers(on):
    on("linux")
    assert "CUDA_VISIBLE_DEVICES" not in after({}, "cuda:1")
    assert in_its_process("cuda:1") == "cuda:1"


def test_it_is_set_before_torch_is_imported():
    """The entry of a rank's process, whose settings and connection come with it, imports neither torch nor diffusers."""
    code = (
        "import sys\n"
        "import parallel_backend.rank.start.entry, multiprocessing.connection\n"
        "print('torch' in sys.modules, 'diffusers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
