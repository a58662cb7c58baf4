"""Fused arithmetic equals diffusers', by torch's operations and by comfy-kitchen's, which on a CPU are torch's too."""

import functools
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from diffusers.models import embeddings

from parallel_backend.client.call import ModelCall
from parallel_backend.core import kitchen
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.models import fused
from testing import tiny
from testing.cases import all_cases

pytestmark = pytest.mark.threads
CASES = {case.name: case for case in all_cases()}
LIMIT = 1e-5


def kernels():
    """Context in which every fused operation is comfy-kitchen's; gives a count of the calls by name."""
    called, direct = Counter(), functools.cache(kitchen.DirectCall)

    def kernel(name, x):
        called[name] += 1
        return direct(name) if x.numel() else None

    assert kitchen.kitchen().tensors is not None
    return called, mock.patch.object(fused, "_kernel", kernel)


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2)], ids=str)
@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("wan-animate-2", {"apply_rope", "adaln"}),
    ],
)
def test_comfy_kitchens_operations_give_the_same(name, used, degrees, pools, tmp_path):
    case = CASES[name]
    model, given = case.model(), case.inputs()
    file = case.save(model, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = case.reference(model, *given)
    remote = pools.load(file, degrees, fresh=True)
    called, patched = kernels()
    with patched:
        out = remote.predict(ModelCall(*given), lambda: None)
    assert tiny.relative(out, expected) < LIMIT
    assert set(called) == used


def turned_tables(*shape):
    angles = torch.rand(*shape) * 6
    return fused.rotation(angles.cos()[None, :, None], angles.sin()[None, :, None]), angles


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(("halves", "dim"), [(False, -1), (True, -2)])
def test_rotations_equal_diffusers(halves, dim, compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, (turns, angles) = torch.randn(2, 7, 3, 16), turned_tables(7, 8)
    doubled = torch.cat((angles, angles), dim=-1) if halves else angles.repeat_interleave(2, dim=-1)
    tables = doubled.cos(), doubled.sin()
    expected = embeddings.apply_rotary_emb(x, tables, use_real_unbind_dim=dim, sequence_dim=1)
    assert torch.allclose(fused.both_rotated(x, x, turns, halves)[1], expected, atol=1e-6)
    half = x.bfloat16()
    rounded = embeddings.apply_rotary_emb(half, tables, use_real_unbind_dim=dim, sequence_dim=1)
    assert torch.equal(fused.both_rotated(half, half[:1], turns, halves)[0], rounded)


def test_more_elements_than_a_kernel_counts_are_torchs(monkeypatch):
    monkeypatch.setattr(fused, "_kernel", lambda name, x: pytest.fail(name))
    norm, vector = torch.nn.LayerNorm(2048, elementwise_affine=False), torch.empty(1, 1, 2048, device="meta")
    assert fused.modulated(norm, torch.empty(1, 1 << 20, 2048, device="meta"), vector, vector).is_meta


def test_there_is_no_kernel_on_a_cpu_nor_in_float32(monkeypatch):
    half = torch.randn(1, 4, 2, 64).bfloat16()
    assert fused._kernel("apply_rope1", half) is None
    monkeypatch.setattr(kitchen, "fused_kernel", lambda name, dtype, device: name)
    on_card = SimpleNamespace(
        is_cuda=True, element_size=lambda: 2, numel=lambda: 8, dtype=half.dtype, device=half.device, requires_grad=False
    )
    assert fused._kernel("apply_rope1", on_card) == "apply_rope1"
    assert fused._kernel("apply_rope1", SimpleNamespace(**vars(on_card) | {"element_size": lambda: 4})) is None
    assert fused._kernel("apply_rope1", SimpleNamespace(**vars(on_card) | {"requires_grad": True})) is None


@pytest.mark.parametrize("name", kitchen.TRIALS)
def test_a_kernel_is_tried_before_it_is_used(name, monkeypatch, caplog):
    def tried():
        return kitchen.fused_kernel.__wrapped__(name, torch.bfloat16, torch.device("cpu"))

    assert tried() is None  # there are no CUDA kernels here
    monkeypatch.setattr(kitchen, "_has_cuda_kernels", lambda: True)
    assert isinstance(tried(), kitchen.DirectCall)
    monkeypatch.setattr(kitchen, "_on", lambda device, value: value + 1 if isinstance(value, torch.Tensor) else value)
    assert tried() is None
    assert "gives other values here than on the CPU" in caplog.text

    def refuse(device, value):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(kitchen, "_on", refuse)
    assert tried() is None
    assert "no kernel image" in caplog.text


def test_an_implementation_is_chosen_for_each_form_of_arguments(monkeypatch):
    x, vectors = torch.randn(1, 3, 8), torch.randn(2, 1, 1, 8)
    asked, kernel = [], kitchen.DirectCall("adaln")
    choose = kernel._registry.get_implementation

    def noted(name, kwargs):
        asked.append(tuple(kwargs["x"].shape))
        return choose(name, kwargs=kwargs)

    monkeypatch.setattr(kernel._registry, "get_implementation", noted)
    for each in (x, x + 1, x[:, :2], x):
        assert torch.equal(kernel(each, *vectors, 1e-6), torch.ops.comfy_kitchen.adaln(each, *vectors, 1e-6))
    ours = [shape for place, shape in enumerate(asked) if place in (0, 3)]
    assert ours == [(1, 3, 8), (1, 2, 8)]
