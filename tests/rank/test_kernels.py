"""Attention in parts, put together by log-sum-exp, equals attention in one piece."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.rank.attention.kernel_choice import choose_kernel
from parallel_backend.rank.attention.ring import merge

KERNEL = choose_kernel("auto", torch.device("cpu"), "fp32")


def problem(queries: int, keys: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, 3, 16, generator=g).to(dtype) for n in (queries, keys, keys)]


def scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[B, q, H, k], by the definition."""
    found = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) / 16**0.5
    return found if mask is None else found.masked_fill(~mask[:, None, None], -torch.inf)


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_and_its_log_sum_exp_are_what_the_formula_says(masked):
    q, k, v = problem(5, 9)
    mask = torch.arange(9)[None] < torch.tensor([[4], [9]]) if masked else None
    expected = torch.einsum("bqhk,bkhd->bqhd", scores(q, k, mask).softmax(-1), v.double())
    out, lse = KERNEL.attend_lse(q, k, v, mask, None)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(KERNEL.attend(q, k, v, mask, None).double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), scores(q, k, mask).logsumexp(-1), atol=1e-5)
    assert lse.shape == q.shape[:3]


def test_an_entry_without_keys_is_zeros_and_minus_infinity():
    q, k, v = problem(5, 9)
    mask = torch.arange(9)[None] < torch.tensor([[0], [9]])
    out, lse = KERNEL.attend_lse(q, k, v, mask, None)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert torch.equal(out[1], KERNEL.attend_lse(q[1:], k[1:], v[1:], mask[1:], None)[0][0])


@given(st.integers(1, 6), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.data())
def test_parts_in_any_order_make_the_whole(queries, lengths, data):
    total = sum(lengths)
    q, k, v = problem(queries, total)
    seen = data.draw(st.lists(st.integers(0, total), min_size=2, max_size=2).filter(lambda n: min(n) > 0))
    mask = torch.arange(total)[None] < torch.tensor(seen)[:, None]
    blocks = list(zip(k.split(lengths, 1), v.split(lengths, 1), mask.split(lengths, 1), strict=True))
    order, result = data.draw(st.permutations(range(len(blocks)))), None
    for index in order:
        part = KERNEL.attend_lse(q, *blocks[index], None)
        result = part if result is None else merge(result, part, masked=True)
    assert torch.allclose(result[0], KERNEL.attend(q, k, v, mask, None), atol=1e-5)
    assert torch.allclose(result[1].double(), scores(q, k, mask).logsumexp(-1), atol=1e-5)


def test_half_precision_is_merged_in_float32():
    q, k, v = problem(4, 8, torch.bfloat16)
    parts = [KERNEL.attend_lse(q, k[:, s], v[:, s], None, None) for s in (slice(0, 3), slice(3, 8))]
    out, lse = merge(*parts, masked=True)
    assert out.dtype == lse.dtype == torch.float32
    assert torch.allclose(out, KERNEL.attend(*(x.float() for x in (q, k, v)), None, None), atol=2e-2)
