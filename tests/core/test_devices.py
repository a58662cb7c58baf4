"""What the `devices` widget may say of a Ray cluster, and what follows from it before any rank starts."""

import importlib.util

import pytest
import torch

from parallel_backend.core.devices import device_kind, in_its_process, names_ray, on_ray, ray_devices
from parallel_backend.core.dtypes import resolve_dtype
from parallel_backend.core.validate import check_attention
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.ray_ranks import RayRanks, start_of
from parallel_backend.rank.comm.process_group import backend_for
from testing import mini


@pytest.fixture
def with_ray(monkeypatch):
    """As if the package were there: names are only looked at."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("text", "world", "devices"),
    [
        ("ray:cuda,cuda", None, ("ray:cuda", "ray:cuda")),
        (" Ray:CPU , cpu", None, ("ray:cpu", "ray:cpu")),
        ("ray", 3, ("ray:cuda",) * 3),
    ],
)
def test_names_of_a_clusters_devices(with_ray, text, world, devices):
    assert names_ray(text)
    assert ray_devices(text, world) == devices


@pytest.mark.parametrize("text", ["ray", "ray:cuda:0", "ray:cuda,", "ray:mps", "ray:cuda,cuda:1"])
def test_other_names_are_refused_by_widget(with_ray, text):
    assert names_ray(text)
    with pytest.raises(ValueError, match=r"^devices: .* such as ray:cuda,cuda"):
        ray_devices(text)


@pytest.mark.parametrize("text", ["auto", "", "cuda:0,cuda:1", "cpu,cpu", "rays", "array:cuda", "cpu,ray:cpu"])
def test_what_is_not_rays_is_left_to_this_machine(text):
    assert not names_ray(text)


def test_without_ray_its_devices_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^devices: ray:cpu,cpu needs the ray package: pip install ray"):
        ray_devices("ray:cpu,cpu")


def test_a_name_says_what_it_is_here_and_in_its_process():
    for name, kind, inside in (
        ("cpu", "cpu", "cpu"),
        ("cuda:1", "cuda", "cuda:1"),
        ("ray:cpu", "cpu", "cpu"),
        ("ray:cuda", "cuda", "cuda:0"),
    ):
        assert device_kind(name) == kind
        assert in_its_process(name) == inside
        assert torch.device(inside).type == kind
        assert on_ray(name) == name.startswith("ray")
        assert start_of((name,)) is (RayRanks if on_ray(name) else LocalRanks)


def test_gpus_of_a_cluster_talk_over_nccl(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend_for(("ray:cuda", "ray:cuda")) == "nccl"
    assert backend_for(("cuda:0", "cuda:1")) == "nccl"
    assert backend_for(("cuda:0", "cuda:0")) == "gloo"  # NCCL refuses two ranks on one GPU
    assert backend_for(("ray:cuda", "ray:cpu")) == "gloo"


def test_what_this_machine_cannot_know_of_others_is_left_to_them():
    assert resolve_dtype("default", "bf16", ("ray:cuda", "ray:cuda")) == "bf16"
    assert resolve_dtype("default", "bf16", ("ray:cpu",)) == "fp32"
    check_attention("flash", ("ray:cuda",), "bf16")
    with pytest.raises(ValueError, match="attention is 'flash'"):
        check_attention("flash", ("ray:cpu",), "fp32")


def test_a_model_is_told_from_another_of_its_kind(mini_model, tmp_path):
    def save(name, model=mini_model):
        return mini.opened(mini.save(model, tmp_path / f"{name}.safetensors"))

    one, same, other = save("one"), save("same"), save("other", mini.random_model(seed=1))
    assert one.path.stat().st_size == other.path.stat().st_size
    same.check_fingerprint(one.fingerprint())
    with pytest.raises(ValueError, match=r"^model_name: .*other\.safetensors differs between this machine"):
        other.check_fingerprint(one.fingerprint())
