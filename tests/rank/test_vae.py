"""A VAE's decoder in bands of rows equals diffusers' decode of the whole latent, and each of its exchanges is needed."""

import copy
import functools
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from torch import nn

from parallel_backend.client import shared_tensors
from parallel_backend.client.call import ModelCall
from parallel_backend.client.vae import TooLittleMemory
from parallel_backend.core import device_copies
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import RankError
from parallel_backend.processes.pool_part import PoolPart
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic
from parallel_backend.rank.vae import banded_layers as banded
from parallel_backend.rank.vae import part as vae_part
from parallel_backend.rank.vae.part import VAEPart, free_bytes
from parallel_backend.vaes import VAES
from parallel_backend.vaes.base import Edges, Weights
from parallel_backend.wire import messages as m
from testing import mini, tiny
from testing.vaes import OnRanks, decoder_of, original_decoder
from tests.support import fake_cuda
from tests.support.emulated_gpu import emulated
from tests.support.on_card import CopyToHost, OnCard

LIMIT = 1e-5
"""Of the largest difference in fp32, as a part of the largest pixel."""
WIDTHS = (32, 32, 64)
WRONG = 1e-3
"""What a missing exchange moves some pixel by, at least."""


@functools.cache
def autoencoder(channels: int = 4, post_quant: bool = True) -> diffusers.AutoencoderKL:
    """A small random one; its latents are a quarter of the picture's side."""
    vae = diffusers.AutoencoderKL(
        latent_channels=channels,
        block_out_channels=WIDTHS,
        down_block_types=("DownEncoderBlock2D",) * len(WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(WIDTHS),
        use_quant_conv=post_quant,
        use_post_quant_conv=post_quant,
    )
    return tiny.randomise(vae.eval().requires_grad_(False), seed=0)


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def whole(vae: diffusers.AutoencoderKL, x: torch.Tensor) -> torch.Tensor:
    return vae.decode(x).sample


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Difference, as a part of the largest value expected."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.fixture
def remote_decoder(pools):
    """`remote_decoder(ranks, vae, name)`: it on that many ranks."""
    return lambda ranks, vae, name="vae": OnRanks(pools(ranks), name, lambda: decoder_of(vae))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "post_quant"),
    [((1, 4, 8, 6), True), ((1, 4, 13, 5), True), ((2, 4, 7, 3), True), ((1, 16, 5, 6), False), ((1, 4, 4, 1), True)],
    ids=lambda value: str(value),
)
def test_bands_equal_the_whole(remote_decoder, ranks, shape, post_quant, measured):
    vae, x = autoencoder(shape[1], post_quant), latent(*shape)
    found = remote_decoder(ranks, vae, f"{shape[1]} channels").decode(x, lambda: None)
    expected = whole(vae, x)
    assert found.shape == expected.shape
    assert expected.std() > 0.1
    measured(f"VAE in bands, largest difference, {ranks} ranks", largest(found, expected))
    assert largest(found, expected) <= LIMIT


def test_repeats_bit_for_bit(remote_decoder):
    decoder, x = remote_decoder(3, autoencoder()), latent(1, 4, 9, 6)
    assert torch.equal(decoder.decode(x, lambda: None), decoder.decode(x, lambda: None))


def test_bands_and_weights_over_pipes_are_those_in_shared_memory(remote_decoder, monkeypatch):
    x = latent(1, 4, 5, 4)
    shared = remote_decoder(2, autoencoder(), "shared").decode(x, lambda: None)
    monkeypatch.setattr(shared_tensors, "sharing_possible", lambda: False)
    assert torch.equal(remote_decoder(2, autoencoder(), "sent").decode(x, lambda: None), shared)


def test_half_precision_is_as_near_as_the_whole_in_it(remote_decoder):
    """Rows at the seams are rounded once, like all others."""
    exact, x = autoencoder(), latent(1, 4, 9, 6)
    half = diffusers.AutoencoderKL.from_config(exact.config).eval().requires_grad_(False)
    half.load_state_dict(exact.state_dict())
    half.to(torch.bfloat16)
    found, expected = remote_decoder(3, half, "bf16").decode(x, lambda: None), whole(exact, x)
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
    decoder.decode(x, lambda: None)
    everywhere = (ranks - 1) * (norms * 2 * 32 * 4 + 4)  # with one number that says whether memory suffices
    keys = [(ranks - 1) * 2 * rows * x.shape[3] * WIDTHS[-1] * 4 for rows in (3, 3, 2)]
    assert row > 0 < norms
    assert decoder.bytes_sent == [
        {"rows": neighbours * row + everywhere + own} for neighbours, own in zip((1, 2, 1), keys, strict=True)
    ]


def test_weights_are_sent_once_until_another_decoder_takes_their_place_or_all_is_unloaded(pools, remote):
    sent = []

    def decode(name: str) -> None:
        def ask() -> Weights:
            sent.append(name)
            return decoder_of(autoencoder())

        found = OnRanks(pools(2), name, ask, decoder_of(autoencoder())).decode(latent(1, 4, 4, 4), lambda: None)
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
    expected = {ranks: OnRanks(pools(ranks), "vae", lambda: decoder_of(vae)).decode(x, lambda: None) for ranks in (2, 3)}
    part = PoolPart(pools(3), (0, 2))
    for turn, pool in enumerate((part, pools(3), part, pools(3), PoolPart(pools(3), (1, 2)), pools(3))):
        decoder = OnRanks(pool, "vae", lambda: decoder_of(vae))
        assert torch.equal(decoder.decode(x, lambda: None), expected[len(pool.devices)])
        if turn == 3:
            part.tell(m.DropVAE())


def test_too_little_memory_is_said_before_anything_is_computed(remote_decoder):
    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 4, 4)
    assert free_bytes(torch.device("cpu")) < 2**60
    with pytest.raises(TooLittleMemory, match="less than the") as short:
        decoder.decode(x, lambda: None, bytes_needed=2**60)
    assert 2**60 < short.value.missing["cpu"] < 2**61  # both ranks', of one memory
    assert largest(decoder.decode(x, lambda: None, bytes_needed=2**20), whole(autoencoder(), x)) <= LIMIT


def test_ranks_of_one_memory_have_to_share_it(remote_decoder):
    """A band of 0.7 of what is free fits on one rank, and not on two."""
    x, band = latent(1, 4, 4, 4), int(0.7 * free_bytes(torch.device("cpu")))
    remote_decoder(1, autoencoder()).decode(x, lambda: None, bytes_needed=band)
    with pytest.raises(TooLittleMemory) as short:
        remote_decoder(2, autoencoder()).decode(x, lambda: None, bytes_needed=band)
    assert 0.1 * band < short.value.missing["cpu"] < band


def test_other_parts_make_way_for_a_band(remote_decoder, pools, monkeypatch):
    """Before a model has to. The decoder itself stays."""
    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 4, 4)
    decoder.decode(x, lambda: None)
    told, tell = [], pools(2).tell
    monkeypatch.setattr(pools(2), "tell", lambda message: told.append(message) or tell(message))
    with pytest.raises(TooLittleMemory):
        decoder.decode(x, lambda: None, bytes_needed=2**60)
    decoder.decode(x, lambda: None)
    assert told == [m.DropVAE(keep="decoder"), m.EndVAE("decoder")]


def test_weights_are_not_put_where_there_is_no_room_for_them(remote_decoder, pools):
    """Other parts make way first. What has made way is sent again."""
    small, x = autoencoder(), latent(1, 4, 4, 4)
    decoder = remote_decoder(2, small)
    decoder.decode(x, lambda: None)
    sizes, asked = decoder_of(small), []
    huge = Weights(sizes.config, {"conv_in.weight": torch.zeros(1).expand(2**58)}, sizes.scale, sizes.channels)
    large = OnRanks(pools(2), "huge", lambda: huge, sizes)
    large.remote.make_room = asked.append
    with pytest.raises(TooLittleMemory, match="that its part of the VAE needs") as short:
        large.decode(x, lambda: None, bytes_needed=2**20)
    assert asked == [2**60 + 2**20]
    assert 2**59 < short.value.missing["cpu"] < 2**60 + 2**22  # the weights once for both ranks
    assert largest(decoder.decode(x, lambda: None), whole(small, x)) <= LIMIT


def test_cancel_leaves_ranks_that_work(remote_decoder):
    class Cancelled(BaseException):
        pass

    def cancel() -> None:
        raise Cancelled

    decoder, x = remote_decoder(2, autoencoder()), latent(1, 4, 5, 4)
    for name in ("vae", "never seen", "nor this"):
        with pytest.raises(Cancelled):
            remote_decoder(2, autoencoder(), name).decode(latent(1, 4, 64, 64), cancel)
        assert largest(decoder.decode(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_cancel_while_weights_are_sent_leaves_ranks_that_agree(remote_decoder, pools):
    """All have the weights, or none: a rank that had not would leave the others waiting in the next picture."""
    pressed, x = threading.Event(), latent(1, 4, 5, 4)

    def ask() -> Weights:
        pressed.set()
        return decoder_of(autoencoder())

    def poll() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    remote_decoder(2, autoencoder()).decode(x, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        OnRanks(pools(2), "being sent", ask, decoder_of(autoencoder())).decode(latent(1, 4, 64, 64), poll)
    assert largest(remote_decoder(2, autoencoder()).decode(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_a_rank_killed_while_decoding_is_named(remote_decoder, pools):
    decoder = remote_decoder(2, autoencoder())
    pid = pools(2).pids[1]
    threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) was killed by signal 9"):
        while True:
            decoder.decode(latent(1, 4, 48, 48), lambda: None)
    x = latent(1, 4, 4, 4)
    assert largest(remote_decoder(2, autoencoder()).decode(x, lambda: None), whole(autoencoder(), x)) <= LIMIT


def test_an_error_in_a_rank_says_that_it_was_decoding(remote_decoder):
    with pytest.raises(RankError, match=r"rank \d \(cpu\) failed in running the VAE: RuntimeError"):
        remote_decoder(2, autoencoder()).decode(latent(1, 3, 4, 4), lambda: None)


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
    vae, x, given = autoencoder(), latent(1, 4, 8, 6), decoder_of(autoencoder())
    put = m.PutVAE("vae", "AutoencoderKL", "decoder", json.dumps(given.config), given.tensors)

    def part(axis: Axis) -> torch.Tensor:
        part = VAEPart(put, axis.index, axis.ranks, torch.device("cpu"))
        own = x.split(4, dim=2)[axis.index]
        return part.run(m.RunVAE("decoder", own, (4, 4), False, True, None, 0)).band

    found = torch.cat(threads(2, without).run(part), dim=2)
    measured(f"VAE in bands, largest difference without {without}", largest(found, whole(vae, x)))
    assert largest(found, whole(vae, x)) <= LIMIT if equal else largest(found, whole(vae, x)) > WRONG


def test_a_band_leaves_a_gpu_through_page_locked_memory_for_its_rows_of_a_picture(monkeypatch):
    """Part by part: torch keeps such memory, so a long video's band may not take it whole."""
    copies: list[CopyToHost] = []
    picture, band = torch.zeros(1, 3, 6, 10, 5), torch.randn(1, 3, 5, 4, 5).bfloat16()
    message = m.RunVAE("decoder", band, (3, 2), False, False, picture, 1)
    monkeypatch.setattr(vae_part, "PART_BYTES", 2 * band[:, :, 0].nbytes)
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:

        def host_buffer(shape: torch.Size, dtype: torch.dtype, _device: torch.device) -> torch.Tensor:
            buffers.append(torch.empty(shape, dtype=dtype))
            cuda.runtime.cudaHostRegister(buffers[-1].data_ptr(), buffers[-1].nbytes, 1)
            return buffers[-1]

        buffers: list[torch.Tensor] = []
        monkeypatch.setattr(device_copies, "host_buffer", host_buffer)
        given = decoder_of(autoencoder())
        put = m.PutVAE("vae", "AutoencoderKL", "decoder", json.dumps(given.config), given.tensors)
        part = VAEPart(put, 1, (0, 1), torch.device("cpu"))
        monkeypatch.setattr(part.model, "forward", lambda *_: OnCard.of(band, cuda, copies))
        part.run(message)
        assert cuda.waits == 3
    assert copies == [CopyToHost(asynchronous=True, page_locked=True, contiguous=True)] * 3
    assert [len(buffer[0, 0]) for buffer in buffers] == [2, 2, 1]
    assert torch.equal(picture[:, :, 1:, 6:], band.float())
    assert not picture[:, :, 0].any()
    assert not picture[:, :, :, :6].any()


def test_weights_and_bands_come_to_the_device_without_a_stop_of_the_host():
    """And an output leaves it with one."""
    given = decoder_of(autoencoder())
    with emulated(fake_cuda.HOPPER) as gpus:
        weights = {name: tensor.pin_memory() for name, tensor in given.tensors.items()}  # as ranks page-lock what they read
        part = VAEPart(
            m.PutVAE("vae", "AutoencoderKL", "decoder", json.dumps(given.config), weights), 0, (0,), torch.device("cuda:0")
        )
        gpus.record.stops[:] = [stop for stop in gpus.record.stops if "recorder.py" not in stop]  # the clock begins once
        assert not gpus.record.stops
        found = part.run(m.RunVAE("decoder", latent(1, 4, 8, 6).pin_memory(), (8,), False, True, None, 0))
        assert len(gpus.record.stops) == 1, gpus.record.stops
    assert found.band.device.type == "cpu"


@pytest.mark.parametrize("offset", [0, 300])
def test_a_group_norm_loses_no_digits_to_a_large_mean(threads, offset):
    """Bands of very different means too: as near to float64 as torch's own is."""
    rows, norm = (3, 1, 2), tiny.randomise(nn.GroupNorm(4, 8, eps=1e-6), seed=2).requires_grad_(False)
    x = latent(2, 8, sum(rows), 5) + offset + 20 * torch.arange(6.0)[:, None]
    exact = nn.functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), 1e-6)

    def part(axis: Axis) -> torch.Tensor:
        layer = nn.GroupNorm(4, 8, eps=1e-6)
        layer.load_state_dict(norm.state_dict())
        banded.Bands(axis, Traffic(torch.device("cpu")), rows).adopt(nn.Sequential(layer))
        return layer(x.split(rows, dim=2)[axis.index])

    with torch.no_grad():
        found = torch.cat(threads(3).run(part), dim=2)
    assert largest(found, exact) <= 2 * largest(norm(x), exact) + 1e-7
    assert largest(apart(norm, x, rows), exact) > 0.1


def apart(norm: nn.GroupNorm, x: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Every band normalised by itself."""
    return torch.cat([norm(band) for band in x.split(rows, dim=2)], dim=2)


def test_a_convolution_that_no_band_can_do_is_not_taken(threads):
    for conv in (nn.Conv2d(2, 2, 3, padding=2, dilation=2), nn.Conv2d(2, 2, 2, padding=1, stride=2), nn.Conv2d(2, 2, 3)):
        bands = banded.Bands(Axis("rows", 2, 0, (0, 1), None), Traffic(torch.device("cpu")))
        with pytest.raises(AssertionError, match="cannot be convolved"):
            bands.adopt(nn.Sequential(conv))


CONVOLUTIONS = {
    "3x3": (nn.Conv2d(2, 3, 3, padding=1), None),
    "5x3, reflected": (nn.Conv2d(2, 3, (5, 3), padding=(2, 1), padding_mode="reflect"), None),
    "3x3x3, repeated": (nn.Conv3d(2, 3, 3, padding=(0, 1, 1), padding_mode="replicate"), None),
    "3x3x3": (nn.Conv3d(2, 3, 3, padding=1), None),
    "half, zeros behind": (nn.Conv2d(2, 3, 3, stride=2), Edges(0, 1, 0, 1)),
    "half, reflected behind": (nn.Conv3d(2, 3, 3, stride=(1, 2, 2)), Edges(0, 1, 0, 1, "reflect")),
    "half, zeros around": (nn.Conv2d(2, 3, 3, stride=2, padding=1), None),
    "quarter": (nn.Conv2d(2, 3, 4, stride=4), None),
}


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_of_bands_is_that_of_the_whole(threads, kind, columns):
    conv, edges = CONVOLUTIONS[kind]
    frames = (4,) if isinstance(conv, nn.Conv3d) else ()
    sizes, dim = (4, 12, 4) if conv.stride[-1] > 1 else (2, 4, 3), -1 if columns else -2
    x = latent(2, 2, *frames, 8, sum(sizes)) if columns else latent(2, 2, *frames, sum(sizes), 8)
    conv.requires_grad_(False)
    around = () if edges is None else (edges.left, edges.right, edges.top, edges.bottom)
    zeros = edges is None or edges.mode == "constant"
    padded = x if edges is None else nn.functional.pad(x, (*around, *((0, 0) if frames and not zeros else ())), edges.mode)
    expected = conv(padded)

    def part(axis: Axis) -> torch.Tensor:
        layer = copy.deepcopy(conv)
        if edges is not None:
            layer.edges = edges
        bands = banded.Bands(axis, Traffic(torch.device("cpu")), sizes, dim)
        bands.adopt(layer)
        return layer(x.split(sizes, dim)[axis.index])

    found = torch.cat(threads(3).run(part), dim)
    assert found.shape == expected.shape
    assert largest(found, expected) <= LIMIT


@pytest.mark.parametrize("residual", [False, True], ids=["Wan 2.1", "Wan 2.2"])
@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_a_causal_vae_in_bands_of_columns_is_that_in_one(threads, part, residual):
    """Three bands of unequal width, three pieces of a video. What is kept between pieces goes at its end."""
    config = {"dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "in_time": [True, True]}
    config |= {"is_residual": residual, "channels": 12 if residual else 3, "patch": 2 if residual else 1}
    weights = tiny.randomise(VAES["AutoencoderKLWan"].build(part, config), seed=0).state_dict()
    put = m.PutVAE("vae", "AutoencoderKLWan", part, json.dumps(config), weights)
    scale = 1 if part == "decoder" else 8 if residual else 4
    x, sizes = latent(1, 4 if part == "decoder" else 3, 9, 2 * scale, 4 * scale), (2 * scale, scale, scale)
    spans = [piece.frames.slice for piece in VAES["AutoencoderKLWan"].pieces(part, 3 if part == "decoder" else 9)]

    def run(sizes: tuple[int, ...]):
        def work(axis: Axis) -> torch.Tensor:
            own = VAEPart(put, axis.index, axis.ranks, torch.device("cpu"))
            band = x.split(sizes, dim=4)[axis.index]
            pieces = [own.run(m.RunVAE(part, band[:, :, s], sizes, True, not i, None, 0)).band for i, s in enumerate(spans)]
            assert own.model._caches
            own.end()
            assert not own.model._caches
            return torch.cat(pieces, dim=2)

        return torch.cat(threads(len(sizes)).run(work), dim=4)

    whole_one = run((4 * scale,))
    assert whole_one.shape[2] == (9 if part == "decoder" else 3)
    assert largest(run(sizes), whole_one) <= LIMIT


@pytest.fixture
def original() -> dict[str, torch.Tensor]:
    return original_decoder(autoencoder())


def taken(state: dict[str, torch.Tensor]) -> Weights | None:
    return VAES["AutoencoderKL"].weights(state, "decoder", {})


def test_names_are_those_that_diffusers_own_converter_knows(original):
    """And nothing but the decoder is taken of a file."""
    found = taken(original | {"encoder.conv_in.weight": torch.zeros(1), "quant_conv.bias": torch.zeros(1)}).tensors
    own = {name: tensor for name, tensor in autoencoder().state_dict().items() if name in decoder_names()}
    layers = ["UpDecoderBlock2D"] * len(WIDTHS)
    file = {name if name.startswith("post_quant") else f"decoder.{name}": tensor for name, tensor in found.items()}
    expected = convert_ldm_vae_checkpoint(file, {"down_block_types": layers, "up_block_types": layers})
    assert len(found) == len(original)
    assert own.keys() == expected.keys()
    assert all(own[name].shape == value.shape and torch.equal(own[name], value) for name, value in expected.items())


def decoder_names() -> list[str]:
    return [name for name in autoencoder().state_dict() if name.startswith(("decoder.", "post_quant_conv."))]


@pytest.mark.parametrize(
    "more",
    [
        {"decoder.mid.block_1.mix_factor": torch.zeros(1)},
        {"decoder.mid.block_1.time_stack.conv1.weight": torch.zeros(3, 3, 1, 1)},
        {"decoder.up.0.attn.0.q.weight": torch.zeros(3, 3, 1, 1)},
        {"decoder.up.0.block.0.conv_shortcut.weight": torch.zeros(3, 3, 3, 3)},
        {"decoder.conv_in.weight": torch.zeros(3, 3, 3, 3, 3)},
        {"decoder.conv_in.conv.weight": torch.zeros(3, 3, 3, 3)},
        {"decoder.conv_in.weight_scale": torch.zeros(1)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_decoder_with_anything_unknown_is_not_taken(original, more):
    assert taken(original) is not None
    assert taken(original | more) is None


def test_a_vae_without_such_a_decoder_is_not_taken():
    assert taken({"taesd_decoder.1.weight": torch.zeros(3, 3, 3, 3)}) is None
