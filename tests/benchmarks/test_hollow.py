"""Hollow devices account for what a device would do: memory by lifetimes, kernels, bytes moved, waits of the host."""

import pytest
import torch
import torch.nn.functional as F

from testing.hollow.account import Account
from testing.hollow.cuda import hollow_cuda
from testing.hollow.tensors import Devices

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def account():
    accounts = (Account(),)
    with hollow_cuda(accounts), Devices(accounts), torch.inference_mode():
        yield accounts[0]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def test_memory_goes_with_the_last_tensor_that_lies_there(account):
    x = empty(3, 256)
    assert account.allocated == 1536
    row = x[1].view(16, 16)
    del x
    assert account.allocated == 1536
    other = row.float()
    assert (account.allocated, account.peak) == (1536 + 1024, 1536 + 1024)
    del row, other
    assert (account.allocated, account.peak) == (0, 1536 + 1024)


def kernels(account, work):
    """By name, of `work`; and the bytes that it moved."""
    account.begin()
    out = work()
    return dict(account.kernels), account.moved.total(), out


X, W = (2, 5, 64), (32, 64)


@pytest.mark.parametrize(
    ("work", "launched", "moved"),
    [
        (lambda: F.linear(empty(*X), empty(*W), empty(32)), {"addmm": 1}, 0),
        (lambda: F.rms_norm(empty(*X), (64,), empty(64)), {"_fused_rms_norm": 1}, 2 * 1280 + 128 + 40),
        (lambda: empty(*X).transpose(1, 2).unflatten(1, (8, 8))[:, 1:], {}, 0),
        (lambda: empty(4, 1).expand(4, 8) + empty(1, 8), {"add": 1}, 8 + 16 + 64),
        (lambda: empty(*X).copy_(empty(64)), {"copy_": 1}, 1280 + 128),
        (lambda: empty(*X).to(torch.float32), {"_to_copy": 1}, 3 * 1280),
        (lambda: F.scaled_dot_product_attention(*(empty(1, 2, 5, 64),) * 3), {"_scaled_dot_product_flash_attention": 1}, 0),
    ],
)
def test_kernels_and_the_bytes_that_they_move(account, work, launched, moved):
    assert kernels(account, work)[:2] == (launched, moved)


def test_stops_of_the_host(account):
    x = torch.ones(4).to(DEVICE, non_blocking=True)
    assert account.stops.total() == 0
    assert x.sum().item() == 0.0
    assert x.cpu().tolist() == [0.0] * 4
    torch.cuda.current_stream(DEVICE).synchronize()
    torch.ones(4).to(DEVICE)
    assert account.stops == {"_local_scalar_dense": 1, "a copy to the host": 1, "a stream": 1, "a copy to the device": 1}
    assert account.copied == {"to the device": 32, "to the host": 16}


def test_tensors_of_host_and_device_do_not_mix(account):
    with pytest.raises(AssertionError, match="on a device and on the host"):
        empty(4) + torch.ones(4)
