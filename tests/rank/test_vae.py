"""A VAE in bands of rows equals the whole one, each of its exchanges is needed, and a trial refuses what no band can do."""

import copy
import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from parallel_backend.client import shared_tensors
from parallel_backend.client.call import ModelCall
from parallel_backend.client.vae import Made, NotExact, TooLittleMemory
from parallel_backend.core import device_copies
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import RankError
from parallel_backend.processes.pool_part import PoolPart
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.vae import banded_layers as banded
from parallel_backend.rank.vae import part as vae_part
from parallel_backend.rank.vae.part import VAEPart, free_bytes
from parallel_backend.wire import messages as m
from testing import mini, tiny
from testing.vae_class import PooledVAE, SmallVAE, WideVAE
from testing.vaes import OnRanks, made_of, small_vae
from tests.support import fake_cuda
from tests.support.emulated_gpu import emulated
from tests.support.on_card import CopyToHost, OnCard

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
    return m.PutVAE("vae", "decoder", made.recipe, made.tensors, trial)


@pytest.fixture
def remote_decoder(pools):
    """`remote_decoder(ranks, vae, name)`: it on that many ranks."""
    return lambda ranks, vae, name="vae": OnRanks(pools(ranks), name, lambda: made_of(vae))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 4, 8, 6), (2, 4, 7, 3), (1, 16, 5, 6), (1, 4, 4, 1)], ids=str)
def test_bands_equal_the_whole(remote_decoder, ranks, shape, measured):
    vae, x = autoencoder(shape[1]), latent(*shape)
    found = remote_decoder(ranks, vae, f"{shape[1]} channels").run(x, lambda: None)
    expected = whole(vae, x)
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    measured(f"VAE in bands, largest difference, {ranks} ranks", largest(found, expected))
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


def test_repeats_bit_for_bit(remote_decoder):
    decoder, x = remote_decoder(3, autoencoder()), latent(1, 4, 9, 6)
    assert torch.equal(decoder.run(x, lambda: None), decoder.run(x, lambda: None))


def test_bands_and_weights_over_pipes_are_those_in_shared_memory(remote_decoder, monkeypatch):
    x = latent(1, 4, 5, 4)
    shared = remote_decoder(2, autoencoder(), "shared").run(x, lambda: None)
    monkeypatch.setattr(shared_tensors, "sharing_possible", lambda: False)
    assert torch.equal(remote_decoder(2, autoencoder(), "sent").run(x, lambda: None), shared)


def test_half_precision_is_as_near_as_the_whole_in_it(pools):
    """Rows at the seams are rounded once, like all others."""
    exact, x = autoencoder(), latent(1, 4, 9, 6)
    half = copy.deepcopy(exact).to(torch.bfloat16)
    found = OnRanks(pools(3), "bf16", lambda: made_of(half), dtype=torch.bfloat16).run(x, lambda: None)
    expected = whole(exact, x)
    assert found.dtype == torch.bfloat16
    assert largest(found, expected) <= 1.5 * largest(whole(half, x.bfloat16()), expected)


def test_a_rank_sends_rows_statistics_and_keys(remote_decoder):
    """Per 3x3 convolution a row to each neighbour, per GroupNorm two numbers for each group, keys and values to all."""
    vae, x, ranks = autoencoder(), latent(1, 4, 8, 6), 3
    row, norms = 0, 0

    def note(module: nn.Module, inputs: tuple[torch.Tensor], _output: torch.Tensor) -> None:
        nonlocal row, norms
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            row += inputs[0].shape[1] * inputs[0].shape[3] * 4
        norms += isinstance(module, nn.GroupNorm)

    hooks = [module.register_forward_hook(note) for module in vae.decoder.modules()]
    whole(vae, x)
    for hook in hooks:
        hook.remove()
    decoder = remote_decoder(ranks, vae)
    decoder.run(x, lambda: None)
    everywhere = (ranks - 1) * norms * 2 * 32 * 4
    keys = [(ranks - 1) * 2 * rows * x.shape[3] * 64 * 4 for rows in (3, 3, 2)]
    assert row > 0 < norms
    assert decoder.bytes_sent == [
        {"rows": neighbours * row + everywhere + own} for neighbours, own in zip((1, 2, 1), keys, strict=True)
    ]


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


def test_a_part_of_the_ranks_and_all_of_them_take_turns(pools):
    """Each has bands of its own, also where others' weights were dropped by a part alone."""
    x, vae = latent(1, 4, 9, 6), autoencoder()
    expected = {ranks: OnRanks(pools(ranks), "vae", lambda: made_of(vae)).run(x, lambda: None) for ranks in (2, 3)}
    part = PoolPart(pools(3), (0, 2))
    for turn, pool in enumerate((part, pools(3), part, pools(3), PoolPart(pools(3), (1, 2)), pools(3))):
        decoder = OnRanks(pool, "vae", lambda: made_of(vae))
        assert torch.equal(decoder.run(x, lambda: None), expected[len(pool.devices)])
        if turn == 3:
            part.tell(m.DropVAE())


def test_too_little_memory_is_said_before_anything_is_computed(remote_decoder):
    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 4, 4)
    assert free_bytes(torch.device("cpu")) < 2**60
    with pytest.raises(TooLittleMemory, match="less than the") as short:
        decoder.run(x, lambda: None, bytes_needed=2**60)
    assert 2**60 < short.value.missing["cpu"] < 2**61  # both ranks', of one memory
    assert largest(decoder.run(x, lambda: None, bytes_needed=2**20), whole(autoencoder(), x)) <= LIMIT


def test_ranks_of_one_memory_have_to_share_it(remote_decoder):
    """A band of 0.7 of what is free fits on one rank, and not on two."""
    x, band = latent(1, 4, 4, 4), int(0.7 * free_bytes(torch.device("cpu")))
    remote_decoder(1, autoencoder()).run(x, lambda: None, bytes_needed=band)
    with pytest.raises(TooLittleMemory) as short:
        remote_decoder(2, autoencoder()).run(x, lambda: None, bytes_needed=band)
    assert 0.1 * band < short.value.missing["cpu"] < band


def test_other_parts_make_way_for_a_band(remote_decoder, pools, monkeypatch):
    """Before a model has to. The decoder itself stays."""
    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 4, 4)
    decoder.run(x, lambda: None)
    told, tell = [], pools(2).tell
    monkeypatch.setattr(pools(2), "tell", lambda message: told.append(message) or tell(message))
    with pytest.raises(TooLittleMemory):
        decoder.run(x, lambda: None, bytes_needed=2**60)
    decoder.run(x, lambda: None)
    assert told == [m.DropVAE(keep="decoder"), m.EndVAE("decoder")]


def test_weights_are_not_put_where_there_is_no_room_for_them(remote_decoder, pools):
    """Other parts make way first. What has made way is sent again."""
    small, x = autoencoder(), latent(1, 4, 4, 4)
    decoder = remote_decoder(2, small)
    decoder.run(x, lambda: None)
    asked: list[int] = []
    large = OnRanks(pools(2), "huge", lambda: Made("{}", {"weight": torch.zeros(1).expand(2**58)}))
    large.remote.make_room = asked.append
    with pytest.raises(TooLittleMemory, match="that its part of the VAE needs") as short:
        large.run(x, lambda: None, bytes_needed=2**20)
    assert asked == [2**60 + 2**20]
    assert 2**59 < short.value.missing["cpu"] < 2**60 + 2**22  # the weights once for both ranks
    assert largest(decoder.run(x, lambda: None), whole(small, x)) <= LIMIT


def test_cancel_leaves_ranks_that_work(remote_decoder):
    class Cancelled(BaseException):
        pass

    def cancel() -> None:
        raise Cancelled

    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 5, 4)
    for name in ("vae", "never seen", "nor this"):
        with pytest.raises(Cancelled):
            remote_decoder(2, autoencoder(), name).run(latent(1, 4, 64, 64), cancel)
        assert largest(decoder.run(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_cancel_while_weights_are_sent_leaves_ranks_that_agree(remote_decoder, pools):
    """All have the weights, or none: a rank that had not would leave the others waiting in the next picture."""
    pressed, x = threading.Event(), latent(1, 4, 5, 4)

    def ask() -> Made:
        pressed.set()
        return made_of(autoencoder())

    def poll() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    remote_decoder(2, autoencoder()).run(x, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        OnRanks(pools(2), "being sent", ask).run(latent(1, 4, 64, 64), poll)
    assert largest(remote_decoder(2, autoencoder()).run(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_a_rank_killed_while_decoding_is_named(remote_decoder, pools):
    decoder = remote_decoder(2, autoencoder())
    pid = pools(2).pids[1]
    threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) was killed by signal 9"):
        while True:
            decoder.run(latent(1, 4, 48, 48), lambda: None)
    x = latent(1, 4, 4, 4)
    assert largest(remote_decoder(2, autoencoder()).run(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_an_error_in_a_rank_says_that_it_was_decoding(remote_decoder):
    remote_decoder(2, autoencoder()).run(latent(1, 4, 4, 4), lambda: None)
    with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in running the VAE: RuntimeError"):
        remote_decoder(2, autoencoder()).run(latent(1, 3, 4, 4), lambda: None)


@dataclass
class Arrived:
    value: object

    def wait(self):
        return self.value


class Threads:
    """Ranks as threads of this process, so that a test can leave one of the exchanges out."""

    def __init__(self, ranks: int, without: str):
        self.ranks, self.without = ranks, without
        self._barrier, self._slots = threading.Barrier(ranks, timeout=60), [None] * ranks

    def _swap(self, index: int, value):
        self._slots[index] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def start_halo(self, x, dim, before, behind, axis, _traffic):
        length = x.shape[dim]
        edges = self._swap(axis.index, (x.narrow(dim, 0, behind), x.narrow(dim, length - before, before)))
        above = edges[axis.index - 1][1] if axis.index > 0 and before else None
        below = edges[axis.index + 1][0] if axis.index < axis.size - 1 and behind else None
        if self.without == "halo":
            above, below = (side if side is None else torch.zeros_like(side) for side in (above, below))
        return Arrived((above, below))

    def start_gather(self, own, _lengths, dim, axis, _traffic):
        values = self._swap(axis.index, own)
        alone = self.without == ("statistics" if dim == 0 else "keys")
        return Arrived([own] * axis.size if alone else values)

    def run(self, work):
        """`work(axis)` of every rank."""
        axes = [Axis("rows", self.ranks, index, tuple(range(self.ranks)), None) for index in range(self.ranks)]
        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(work, axes))


@pytest.fixture
def threads(monkeypatch):
    def make(ranks: int, without: str = "nothing") -> Threads:
        made = Threads(ranks, without)
        monkeypatch.setattr(banded, "start_halo", made.start_halo)
        monkeypatch.setattr(banded, "start_gather", made.start_gather)
        monkeypatch.setattr(VAEPart, "_all", lambda self, fits: True)
        return made

    return make


@pytest.mark.parametrize(("without", "equal"), [("nothing", True), ("halo", False), ("statistics", False), ("keys", False)])
def test_each_exchange_is_needed(threads, without, equal, measured):
    vae, x, put = autoencoder(), latent(1, 4, 8, 6), put_of(made_of(autoencoder()))

    def part(axis: Axis) -> torch.Tensor:
        part = VAEPart(put, axis.index, axis.ranks, torch.device("cpu"))
        own = x.split(4, dim=2)[axis.index]
        return part.run(m.RunVAE("decoder", own, (4, 4), False, None)).band

    found = torch.cat(threads(2, without).run(part), dim=2)
    measured(f"VAE in bands, largest difference without {without}", largest(found, whole(vae, x)))
    assert largest(found, whole(vae, x)) <= LIMIT if equal else largest(found, whole(vae, x)) > WRONG


def test_a_band_leaves_a_gpu_through_page_locked_memory_for_its_rows_of_a_picture(monkeypatch):
    """Part by part: torch keeps such memory, so a long video's band may not take it whole."""
    copies: list[CopyToHost] = []
    picture, band = torch.zeros(1, 3, 5, 10, 5), torch.randn(1, 3, 5, 4, 5).bfloat16()
    message = m.RunVAE("decoder", band, (3, 2), False, picture)
    monkeypatch.setattr(vae_part, "PART_BYTES", 2 * band[:, :, 0].nbytes)
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:

        def host_buffer(shape: torch.Size, dtype: torch.dtype, _device: torch.device) -> torch.Tensor:
            buffers.append(torch.empty(shape, dtype=dtype))
            cuda.runtime.cudaHostRegister(buffers[-1].data_ptr(), buffers[-1].nbytes, 1)
            return buffers[-1]

        buffers: list[torch.Tensor] = []
        monkeypatch.setattr(device_copies, "host_buffer", host_buffer)
        part = VAEPart(put_of(made_of(autoencoder())), 1, (0, 1), torch.device("cpu"))
        monkeypatch.setattr(part, "_computed", lambda *_: OnCard.of(band, cuda, copies))
        part.run(message)
        assert cuda.waits == 3
    assert copies == [CopyToHost(asynchronous=True, page_locked=True, contiguous=True)] * 3
    assert [len(buffer[0, 0]) for buffer in buffers] == [2, 2, 1]
    assert torch.equal(picture[:, :, :, 6:], band.float())
    assert not picture[:, :, :, :6].any()


def test_weights_and_bands_come_to_the_device_without_a_stop_of_the_host():
    """And an output leaves it with one."""
    given = made_of(autoencoder())
    with emulated(fake_cuda.HOPPER) as gpus:
        weights = {name: tensor.pin_memory() for name, tensor in given.tensors.items()}  # as ranks page-lock what they read
        part = VAEPart(put_of(Made(given.recipe, weights)), 0, (0,), torch.device("cuda:0"))
        gpus.record.stops[:] = [stop for stop in gpus.record.stops if "recorder.py" not in stop]  # the clock begins once
        assert not gpus.record.stops
        found = part.run(m.RunVAE("decoder", latent(1, 4, 8, 6).pin_memory(), (8,), False, None))
        assert len(gpus.record.stops) == 1, gpus.record.stops
    assert found.band.device.type == "cpu"


@pytest.mark.parametrize("offset", [0, 300])
def test_a_group_norm_loses_no_digits_to_a_large_mean(threads, offset):
    """Bands of very different means too: as near to float64 as torch's own is."""
    rows, norm = (3, 1, 2), tiny.randomise(nn.GroupNorm(4, 8, eps=1e-6), seed=2).requires_grad_(False)
    x = latent(2, 8, sum(rows), 5) + offset + 20 * torch.arange(6.0)[:, None]
    exact = nn.functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), 1e-6)

    def part(axis: Axis) -> torch.Tensor:
        with bands_of(axis, rows):
            return norm(x.split(rows, dim=2)[axis.index])

    with torch.no_grad():
        found = torch.cat(threads(3).run(part), dim=2)
    assert largest(found, exact) <= 2 * largest(norm(x), exact) + 1e-7
    assert largest(apart(norm, x, rows), exact) > 0.1


def apart(norm: nn.GroupNorm, x: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Every band normalised by itself."""
    return torch.cat([norm(band) for band in x.split(rows, dim=2)], dim=2)


def bands_of(axis: Axis, sizes: tuple[int, ...], dim: int = banded.ROWS) -> banded.Bands:
    bands = banded.Bands(axis, Traffic(torch.device("cpu")))
    bands.sizes, bands.dim = sizes, dim
    return bands


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 2, 4, padding=1),
        nn.Conv2d(2, 2, 2, padding=1, stride=2),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
    ],
    ids=str,
)
def test_padding_that_no_band_can_do_is_refused(conv):
    with bands_of(Axis("rows", 1, 0, (0,), None), (4,)), pytest.raises(AssertionError, match="a band "):
        conv(latent(1, 2, 4, 4))


CONVOLUTIONS = {
    "3x3": (nn.Conv2d(2, 3, 3, padding=1), None),
    "3x3, with gaps": (nn.Conv2d(2, 3, 3, padding=2, dilation=2), None),
    "5x3, reflected": (nn.Conv2d(2, 3, (5, 3), padding=(2, 1), padding_mode="reflect"), None),
    "3x3x3, repeated": (nn.Conv3d(2, 3, 3, padding=(0, 1, 1), padding_mode="replicate"), None),
    "3x3x3": (nn.Conv3d(2, 3, 3, padding=1), None),
    "half, zeros behind": (nn.Conv2d(2, 3, 3, stride=2), nn.ZeroPad2d((0, 1, 0, 1))),
    "half, reflected behind": (nn.Conv3d(2, 3, 3, stride=(1, 2, 2)), nn.ReflectionPad3d((0, 1, 0, 1, 0, 0))),
    "half, zeros around": (nn.Conv2d(2, 3, 3, stride=2, padding=1), None),
    "quarter": (nn.Conv2d(2, 3, 4, stride=4), None),
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

    found = torch.cat(threads(3).run(part), dim)
    assert found.shape == expected.shape
    assert largest(found, expected) <= LIMIT


def test_code_that_goes_by_memory_does_the_same_on_all_ranks(threads):
    def part(axis: Axis) -> int:
        with bands_of(axis, (3, 2)):
            return torch.zeros(1, 4, (6, 4)[axis.index], 5).numel()

    assert threads(2).run(part) == [120, 120]
