"""Compressed transfers: how far values and pictures are from the exact ones, and how many bytes travel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.comm.transfer_codec import KINDS, Codec
from testing import mini
from testing.models import on_ranks
from tests.system.test_exactness import name

pytestmark = pytest.mark.threads

ERROR = {"int8": 1.02 * 0.5 / 127, "fp8": 1.02 * 2**-4}
"""Largest error of a value over the largest value of its group: half a step, the scale having been rounded up; of fp8 over
the value itself, half of its last bit."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def there_and_back(codec: Codec, values: torch.Tensor, size: int) -> torch.Tensor:
    packed = torch.full((codec.nbytes(values.numel(), size),), 255, dtype=torch.uint8)
    out = torch.full_like(values, torch.nan)
    codec.encode(values.view(-1), size, packed)
    codec.decode(packed, size, out.view(-1))
    return out


@given(
    kind=st.sampled_from(list(KINDS)),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1, 7, 16, 64, 72, 88, 128]),
    vectors=st.integers(0, 5),
    exponent=st.integers(-12, 4),
    seed=st.integers(0, 1000),
)
def test_every_value_is_close_on_the_scale_of_its_group(kind, dtype, size, vectors, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(vectors, size, generator=generator).exp2_().sub_(1).mul_(10.0**exponent)
    values = values.clamp(-6e4, 6e4).to(dtype)  # within float16
    out = there_and_back(Codec(kind), values, size).double()
    group = next(n for n in range(32, 0, -1) if size % n == 0)
    groups, error = values.double().view(-1, group), (out - values.double()).abs().view(-1, group)
    peaks = groups.abs().amax(1, keepdim=True)
    rounding = torch.finfo(dtype).eps * groups.abs() + torch.finfo(dtype).smallest_normal * 2
    if kind == "int8":
        limit = ERROR[kind] * peaks + rounding
    else:  # below its smallest normal number fp8 has equal steps
        limit = torch.maximum(ERROR[kind] * groups.abs(), 2**-9 / 448 * peaks) + rounding
    assert (error <= limit).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(kind):
    values = torch.zeros(4, 32)
    values[1, 3], values[2, 5] = torch.nan, torch.inf
    out = there_and_back(Codec(kind), values, 32)
    assert torch.equal(out[[0, 3]], values[[0, 3]])
    assert not out[1, 3].isfinite() and not out[2, 5].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_value_costs_only_its_own_group(kind):
    values = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    values[:, 40] = 500.0
    error = (there_and_back(Codec(kind), values, 128) - values).norm(dim=0)
    assert error[:32].max() < 0.5 * error[32:64].max() if kind == "int8" else error[:32].max() < 1.0


def load(pools, path, degrees: Degrees, transfer_dtype: str = "full", dtype: str = "fp32") -> RemoteTransformer:
    pools.forget(degrees.world)
    checkpoint = mini.opened(path)
    ranks = pools(degrees.world)
    return on_ranks(ranks, checkpoint, degrees, dtype, "sdpa", lambda: None, transfer_dtype=transfer_dtype)


def ulysses_bytes(model: RemoteTransformer, *inputs) -> int:
    report = lambda: model.close_run(model.open_run(), lambda: None)  # noqa: E731
    report()
    model.predict(ModelCall(*inputs), lambda: None)
    return sum(stats.bytes_sent.get("ulysses", 0) for stats in report())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_sent(pools, mini_file, dtype):
    """One byte for each value, and two for each of the groups, which the tiny model's heads are: 16 values."""
    inputs = mini.inputs()
    full = ulysses_bytes(load(pools, mini_file, Degrees(ulysses=2), dtype=dtype), *inputs)
    layers, tokens, width = 8, 7 + 8 * 6, 8 * 16
    itemsize = 4 if dtype == "fp32" else 2
    leaving = 2 * tokens * width * itemsize  # all ranks have what leaves the blocks; batch 2
    full -= leaving
    assert full == layers * 4 * 2 * tokens * width // 2 * itemsize  # q, k, v, out; half is for the other rank
    for kind in KINDS:
        sent = ulysses_bytes(load(pools, mini_file, Degrees(ulysses=2), kind, dtype), *inputs)
        assert sent - leaving == full // itemsize * 18 // 16


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(ulysses=2),
        pytest.param(Degrees(ulysses=3), marks=pytest.mark.slow),
        pytest.param(Degrees(ulysses=2, ring=2), marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_products_are_near_and_full_is_exact(pools, mini_file, mini_model, degrees):
    """Odd sizes: tokens and heads divide unevenly."""
    inputs = mini.inputs(height=15, width=11)
    expected = mini.reference(mini_model, *inputs)
    full = load(pools, mini_file, degrees).predict(ModelCall(*inputs), lambda: None)
    assert mini.relative(full, expected) < 1e-5
    for kind, limit in (("int8", 2e-3), ("fp8", 1e-2)):
        error = mini.relative(load(pools, mini_file, degrees, kind).predict(ModelCall(*inputs), lambda: None), expected)
        assert 1e-4 < error < limit
