"""A VAE in bands of rows equals the whole one, each of its exchanges is needed, and a trial refuses what no band can do."""

import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from parallel_backend.client.call import ModelCall
from parallel_backend.client.vae import Made, NotExact, TooLittleMemory
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import RankError
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.vae import banded_layers as banded
from parallel_backend.rank.vae.part import VAEPart, free_bytes
from parallel_backend.wire import messages as m
from testing import mini
from testing.models import Cancelled, cancel
from testing.vae_class import PooledVAE, SmallVAE, WideVAE
from testing.vaes import OnRanks, made_of, randomise, small_vae

LIMIT = 1e-5
"""Of the largest difference in fp32, as a part of the largest pixel."""
WRONG = 1e-3
"""What a missing exchange moves some pixel by, at least."""
autoencoder = functools.cache(small_vae)


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def whole(vae: SmallVAE, x: torch.Tensor) -> torch.Tensor:
    return vae.decode(x)


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Difference, as a part of the largest value expected."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def put_of(made: Made, trial: m.RunVAE | None = None) -> m.PutVAE:
    return m.PutVAE("vae", made.recipe, made.tensors, trial)


@pytest.fixture
def remote_decoder(pools):
    """`remote_decoder(ranks, vae, name)`: it on that many ranks."""
    return lambda ranks, vae, name="vae": OnRanks(pools(ranks), name, lambda: made_of(vae))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shape", [(1, 4, 8, 6), (2, 4, 7, 3), (1, 4, 4, 1)], ids=str)
def test_bands_equal_the_whole(remote_decoder, ranks, shape):
    vae, x = autoencoder(shape[1]), latent(*shape)
    found = remote_decoder(ranks, vae, f"{shape[1]} channels").run(x, lambda: None)
    expected = whole(vae, x)
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    assert largest(found, expected) <= LIMIT


def test_bands_of_columns_are_encoded_as_the_whole(pools):
    vae, pixels = autoencoder(), latent(1, 3, 16, 28)
    found = OnRanks(pools(3), "vae", lambda: made_of(vae, "encoder"), "encoder").run(pixels, lambda: None)
    with torch.inference_mode():
        expected = vae.encode(pixels)
    assert found.shape == expected.shape
    assert largest(found, expected) <= LIMIT


def test_a_class_whose_bands_are_not_the_whole_is_refused(remote_decoder):
    """By a trial, before anything is computed, and at every picture."""
    wrong, x = remote_decoder(2, autoencoder(kind=PooledVAE), "pooled"), latent(1, 4, 9, 6)
    for _ in range(2):
        with pytest.raises(NotExact, match="its bands differ from the whole by"):
            wrong.run(x, lambda: None)
    assert largest(remote_decoder(2, autoencoder()).run(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_a_class_that_fails_on_one_rank_alone_leaves_no_rank_waiting(remote_decoder):
    """In the trial one rank has two rows and the other one. The first would wait for the second's exchange."""
    with pytest.raises(NotExact, match="a band of 1 rows has fewer than its neighbours need"):
        remote_decoder(2, autoencoder(kind=WideVAE), "wide").run(latent(1, 4, 9, 6), lambda: None)


def test_weights_are_sent_once_until_another_decoder_takes_their_place_or_all_is_unloaded(pools, remote):
    sent = []

    def decode(name: str) -> None:
        def ask() -> Made:
            sent.append(name)
            return made_of(autoencoder())

        found = OnRanks(pools(2), name, ask).run(latent(1, 4, 4, 4), lambda: None)
        assert largest(found, whole(autoencoder(), latent(1, 4, 4, 4))) <= LIMIT

    model = remote(Degrees(pipe=2), fresh=True)
    given = mini.inputs()
    before = model.predict(ModelCall(*given), lambda: None)
    for name in ("a", "a", "b", "b", "a"):
        decode(name)
    assert sent == ["a", "b", "a"]
    assert torch.equal(
        model.predict(ModelCall(*given), lambda: None), before
    )  # beside the decoder the model stays as it was
    pools(2).ask(m.Unload(), m.Unloaded).result(timeout=60)
    pools.forget(2)
    decode("a")
    assert sent == ["a", "b", "a", "a"]


def test_too_little_memory_is_said_before_anything_is_computed(remote_decoder):
    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 4, 4)
    assert free_bytes(torch.device("cpu")) < 2**60
    with pytest.raises(TooLittleMemory, match="less than the") as short:
        decoder.run(x, lambda: None, bytes_needed=2**60)
    assert 2**60 < short.value.missing["cpu"] < 2**61  # both ranks', of one memory
    assert largest(decoder.run(x, lambda: None, bytes_needed=2**20), whole(autoencoder(), x)) <= LIMIT


def test_cancel_leaves_ranks_that_work(remote_decoder):
    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 5, 4)
    for name in ("vae", "never seen", "nor this"):
        with pytest.raises(Cancelled):
            remote_decoder(2, autoencoder(), name).run(latent(1, 4, 64, 64), cancel)
        assert largest(decoder.run(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_a_rank_killed_while_decoding_is_named(remote_decoder, pools):
    decoder = remote_decoder(2, autoencoder())
    pid = pools(2).ranks.pids[1]
    threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) was killed by signal 9"):
        while True:
            decoder.run(latent(1, 4, 48, 48), lambda: None)
    x = latent(1, 4, 4, 4)
    assert largest(remote_decoder(2, autoencoder()).run(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


@pytest.fixture
def threads(thread_pools):
    """`threads(ranks, work)`: what `work(axis)` gives on each of so many ranks, threads with a mailbox between them."""
    (distributed,) = thread_pools.start.args

    def run(ranks: int, work):
        world = distributed.world(ranks)

        def on_rank(index: int):
            distributed.enter(world, index)
            return work(Axis("rows", ranks, index, tuple(range(ranks)), None))

        with ThreadPoolExecutor(ranks) as at_once:
            return list(at_once.map(on_rank, range(ranks)))

    return run


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("start_halo", lambda *_: True),
        ("start_gather", lambda _lengths, dim, *_: dim == 0),  # statistics of a norm
        ("start_gather", lambda _lengths, dim, *_: dim != 0),  # keys and values
    ],
    ids=["halo", "statistics", "keys"],
)
def test_each_exchange_is_needed(threads, monkeypatch, name, left_out):
    """Zeros in its place are seen in the image."""
    vae, x, put, start = autoencoder(), latent(1, 4, 8, 6), put_of(made_of(autoencoder())), getattr(banded, name)
    monkeypatch.setattr(banded, name, lambda own, *how: start(torch.zeros_like(own) if left_out(*how) else own, *how))

    def part(axis: Axis) -> torch.Tensor:
        part = VAEPart(put, axis.index, axis.ranks, torch.device("cpu"))
        own = x.split(4, dim=2)[axis.index]
        return part.run(m.RunVAE(own, (4, 4), False)).band

    assert largest(torch.cat(threads(2, part), dim=2), whole(vae, x)) > WRONG


@pytest.mark.parametrize("offset", [0, 300])
def test_a_group_norm_loses_no_digits_to_a_large_mean(threads, offset):
    """Bands of very different means too: as near to float64 as torch's own is."""
    rows, norm = (3, 1, 2), randomise(nn.GroupNorm(4, 8, eps=1e-6), seed=2).requires_grad_(False)
    x = latent(2, 8, sum(rows), 5) + offset + 20 * torch.arange(6.0)[:, None]
    exact = nn.functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), 1e-6)

    def part(axis: Axis) -> torch.Tensor:
        with bands_of(axis, rows):
            return norm(x.split(rows, dim=2)[axis.index])

    with torch.no_grad():
        found = torch.cat(threads(3, part), dim=2)
    assert largest(found, exact) <= 2 * largest(norm(x), exact) + 1e-7
    assert largest(apart(norm, x, rows), exact) > 0.1


def apart(norm: nn.GroupNorm, x: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Every band normalised by itself."""
    return torch.cat([norm(band) for band in x.split(rows, dim=2)], dim=2)


def bands_of(axis: Axis, sizes: tuple[int, ...], dim: int = banded.ROWS) -> banded.Bands:
    bands = banded.Bands(axis, Traffic(torch.device("cpu")))
    bands.sizes, bands.dim = sizes, dim
    return bands


CONVOLUTIONS = {
    "3x3": (nn.Conv2d(2, 3, 3, padding=1), None),
    "5x3, reflected": (nn.Conv2d(2, 3, (5, 3), padding=(2, 1), padding_mode="reflect"), None),
    "3x3x3, repeated": (nn.Conv3d(2, 3, 3, padding=(0, 1, 1), padding_mode="replicate"), None),
    "half, zeros behind": (nn.Conv2d(2, 3, 3, stride=2), nn.ZeroPad2d((0, 1, 0, 1))),
    "half, reflected behind": (nn.Conv3d(2, 3, 3, stride=(1, 2, 2)), nn.ReflectionPad3d((0, 1, 0, 1, 0, 0))),
}


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_of_bands_is_that_of_the_whole(threads, kind, columns):
    conv, pad = CONVOLUTIONS[kind]
    layers = nn.Sequential(pad or nn.Identity(), conv).requires_grad_(False)
    frames = (4,) if isinstance(conv, nn.Conv3d) else ()
    sizes, dim = (4, 12, 4) if conv.stride[-1] > 1 else (2, 4, 3), -1 if columns else -2
    x = latent(2, 2, *frames, 8, sum(sizes)) if columns else latent(2, 2, *frames, sum(sizes), 8)
    expected = layers(x)

    def part(axis: Axis) -> torch.Tensor:
        with bands_of(axis, sizes, dim):
            return layers(x.split(sizes, dim)[axis.index])

    found = torch.cat(threads(3, part), dim)
    assert found.shape == expected.shape
    assert largest(found, expected) <= LIMIT
