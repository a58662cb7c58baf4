"""A call whose MODEL names an attention kernel (BlockChanges.attention) is computed by it on every rank; no other call is.

The kernel is a stand-in for SageAttention that computes exactly and counts, on CPU ranks that take it for possible there.
"""

from dataclasses import replace

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.attention_kernels import AttentionKernel
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from testing import mini
from testing.models import nobody
from tests.support import attention_packages as packages

pytestmark = pytest.mark.threads

MODES = [Degrees(), Degrees(pipe=2), Degrees(ulysses=2), Degrees(ring=2), Degrees(tensor=2), Degrees(batch=2)]


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """By call of the package: the numbers' format that was asked for, or empty for the package's own choice."""
    calls: list[str] = []

    def own_choice(*given, **named):
        calls.append("")
        return packages.sageattn_2(*given, **named)

    def in_fp8(*given, pv_accum_dtype, **named):
        calls.append(pv_accum_dtype)
        return packages.sageattn_qk_int8_pv_fp8_cuda(*given, pv_accum_dtype=pv_accum_dtype, **named)

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
        return own_choice(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, **kwargs)

    functions = {"sageattn": sageattn, "sageattn_qk_int8_pv_fp8_cuda": in_fp8}
    packages.install(monkeypatch, "sageattention", **functions)
    monkeypatch.setattr(AttentionKernel, "possible", lambda kernel, device, dtype: kernel.name in ("sdpa", "sage"))
    return calls


@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_calls_with_and_without_in_turn(pools, mini_file, seen, degrees):
    model, call = pools.mini(mini_file, degrees, fresh=True), ModelCall(*mini.inputs())
    plain = model.predict(call, nobody)
    assert not seen
    for kernel, formats in (("sage", {""}), ("sage.fp8_cuda", {"fp32+fp32"}), ("sage.fp8_cuda++", {"fp32+fp16"})):
        found = model.predict(replace(call, changes=BlockChanges(attention=kernel)), nobody)
        assert set(seen) == formats
        assert mini.relative(found, plain) <= 1e-5
        seen.clear()
    assert torch.equal(model.predict(call, nobody), plain)
    assert not seen
    pools.forget(degrees.world)


@pytest.mark.parametrize("kernel", ["comfy_kitchen", "sage.fp16_cuda"])
def test_what_a_rank_cannot_run_is_computed_by_torchs(pools, mini_file, seen, kernel):
    """The device has no such kernel; the installed release has no such function."""
    model, given = pools.mini(mini_file, Degrees(), fresh=True), mini.inputs()
    plain = model.predict(ModelCall(*given), nobody)
    assert torch.equal(model.predict(ModelCall(*given, changes=BlockChanges(attention=kernel)), nobody), plain)
    assert not seen
    pools.forget(1)
