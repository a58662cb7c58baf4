"""Transfers of what changed: the same values on both ends, errors that do not add up, bytes, when exact ones are sent."""

from collections import defaultdict

import pytest
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.packed_values import CHANGE_BITS, change_bytes
from parallel_backend.rank.comm.change_codec import ChangeCodec, ChangeGathering, Held
from testing import mini
from tests.rank.test_transfer_codec import load as load_on

pytestmark = pytest.mark.threads

DISPLACED = Degrees(patch=2, patch_mode="displaced")
STEPS_OF_A_RUN = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vectors", "size"), [(5, 7), (3, 72), (4000, 128), (0, 16)])
def test_both_ends_hold_the_same_and_errors_do_not_add_up(dtype, vectors, size):
    """Values that change by a tenth a call: what ranks hold is as near after 12 calls as after 4."""
    generator = torch.Generator().manual_seed(4)
    values, codec = torch.randn(vectors * size, generator=generator).to(dtype), ChangeCodec(CHANGE_BITS)
    sender, errors = values.clone(), []
    receiver = sender.clone()
    for _ in range(12):
        values = (values.float() + 0.1 * torch.randn(vectors * size, generator=generator)).to(dtype)
        packed = codec.encode(values, sender, size)
        assert len(packed) == codec.nbytes(len(values), size)
        for held in (sender, receiver):
            codec.add(packed.clone(), held, size)
        assert torch.equal(sender, receiver)
        errors.append((sender.float() - values.float()).square().mean().sqrt().item())
    if vectors:
        assert max(errors[3:]) < 0.015  # after changes of 0.1
    if vectors == 4000:
        assert max(errors[8:]) < 1.05 * max(errors[3:8])


def test_what_does_not_change_is_reached():
    values, held, codec = torch.randn(64 * 16), torch.zeros(64 * 16), ChangeCodec(CHANGE_BITS)
    for _ in range(8):
        codec.add(codec.encode(values, held, 16), held, 16)
    assert (held - values).abs().max() < 1e-4
    before = values.clone()
    held = values.clone()
    codec.add(codec.encode(values, held, 16), held, 16)
    assert torch.equal(held, before) and torch.equal(values, before)
    values[5] = torch.nan
    codec.add(codec.encode(values, held, 16), held, 16)
    assert not held[:16].isfinite().any() and torch.equal(held[16:], before[16:])


def sampled(model: RemoteTransformer, seed: int = 0, steps: int = STEPS_OF_A_RUN, guided: bool = False, warm_up: int = 1):
    """A run in displaced patches: the latent and bytes sent by the patch ranks."""
    model.close_run(model.open_run(), lambda: None)
    noise, _, tensors = mini.inputs(batch=1, height=16, width=12, text=8)
    noise = noise + torch.randn(noise.shape, generator=torch.Generator().manual_seed(seed))
    negative = {"context": tensors["context"].flip(1)} | {k: v for k, v in tensors.items() if k != "context"}
    prompt = Prompt(tensors, negative if guided else {}, 3.0 if guided else 1.0)
    latent, stats = sample_in_bands(model, noise, linear_sigmas(steps), prompt, 1, warm_up)
    return latent, sum(rank.bytes_sent.get("patch", 0) for rank in stats)


@pytest.fixture
def load(pools, mini_file):
    return lambda kind, dtype="fp32": load_on(pools, mini_file, DISPLACED, kind, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_sent(load, dtype):
    """Exact calls and displaced ones of `full` send keys and values as they are: half of the tokens from each rank."""
    layers, values = 8, 2 * (8 + 48) * 8 * 16
    full = layers * values * (4 if dtype == "fp32" else 2)
    leaving = STEPS_OF_A_RUN * full // layers // 2  # all ranks have what leaves the blocks
    assert sampled(load("full", dtype))[1] - leaving == STEPS_OF_A_RUN * full
    changes = layers * change_bytes(values, 16, CHANGE_BITS)
    assert sampled(load("residual", dtype))[1] - leaving == full + (STEPS_OF_A_RUN - 1) * changes
    assert changes * 32 == full * (4.0 + 1) * 32 // (
        32 if dtype == "fp32" else 16
    )  # 16 values and the 2 bytes of their step


def test_ranks_hold_the_same_parts(load, monkeypatch):
    """What a rank holds of its own keys and values after a call is what the other one holds of them, bit for bit."""
    start, wait = Held.start_gather, ChangeGathering.wait
    sent, received = defaultdict(list), defaultdict(list)

    def start_gather(held, own, axis, traffic):
        gathering = start(held, own, axis, traffic)
        sent[axis.index].append(held.parts[axis.index].clone())
        return gathering

    def waited(gathering):
        parts = wait(gathering)
        received[1 - gathering.index].append(parts[1 - gathering.index].clone())
        return parts

    monkeypatch.setattr(Held, "start_gather", start_gather)
    monkeypatch.setattr(ChangeGathering, "wait", waited)
    sampled(load("residual", "bf16"), guided=True)
    calls = 8 * (STEPS_OF_A_RUN - 1)  # layers; both prompts are in one call
    for rank in range(2):
        assert len(sent[rank]) == calls
        assert len(received[rank]) == calls - 8  # nobody reads those of the last step
        assert all(map(torch.equal, sent[rank], received[rank]))
        assert not torch.equal(sent[rank][0], sent[rank][8])


def test_pictures_are_near_those_of_full_transfers(load):
    exact, model = sampled(load("full"), guided=True)[0], load("residual")
    latent, _ = sampled(model, guided=True)
    error = mini.relative(latent, exact)
    assert 1e-6 < error < 2e-3
    # Runs and the two prompts of one share nothing, so a run is the same whatever came before it.
    sampled(model, seed=1, guided=True)
    assert torch.equal(sampled(model, guided=True)[0], latent)


def test_every_exact_step_renews_what_changes_are_relative_to(load):
    """Relative to values of the first one, those of the last are farther away, and their errors larger."""
    first, last = (
        mini.relative(sampled(load("residual"), warm_up=steps)[0], sampled(load("full"), warm_up=steps)[0])
        for steps in (1, 3)
    )
    assert 1e-6 < last < first
