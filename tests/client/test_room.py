"""Memory on GPUs: what the model counts there, and whoever has models of its own on one is asked to make room in time.

Two cards of 24 GB, Flux of real size in bf16 at 1,024 x 1,024, and a text encoder of ComfyUI's on the first card.
"""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.call import Conditioning, TokenLayout
from parallel_backend.client.memory_guard import MemoryGuard
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.placement.balance import divide, even_stages
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.gpu_overheads import CONTEXT
from parallel_backend.placement.memory_check import MemoryCheck
from parallel_backend.placement.memory_model import KV_COPIES, USABLE_MEMORY, bytes_by_block, bytes_outside_blocks, memory_of
from parallel_backend.placement.model_sizes import block_lists, model_sizes
from parallel_backend.wire import messages as m
from testing import mini
from tests.support.fake_cuda import ADA, fake_cuda

TWO = Degrees(pipe=2)
DEVICES = ("cuda:0", "cuda:1")
TEXT_ENCODER = 9_800_000_000
"""Bytes of T5-XXL in fp16."""
LATENT, PROMPT = (1, 16, 128, 128), 512


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    path = mini.save_header(tmp_path_factory.mktemp("flux") / "flux1-dev.safetensors")
    return mini.opened(path, height=LATENT[-2], width=LATENT[-1], text=PROMPT)


def nobody() -> None:
    pass


class Host:
    """ComfyUI and the ranks, as far as two cards' memory goes. What this process holds on them is ComfyUI's."""

    def __init__(self, cuda, flux, resident: int):
        self.cuda, self.resident, self.gives = cuda, resident, True
        self.ranks = [0, 0]  # bytes of each rank's model and run
        self.asked: list[tuple[str, int]] = []
        cuda.hold(CONTEXT + resident, 0)
        for device in range(2):
            cuda.hold_elsewhere(CONTEXT, device)  # the rank's
        spans = even_stages(57, 2)
        self.check = MemoryCheck(flux, mini.setup(flux.path, "bf16", DEVICES, TWO, "auto"), spans, 2)
        pool = SimpleNamespace(devices=DEVICES, ask=self._ask)
        self.guard = MemoryGuard(pool, self.check, flux.built, self.make_room)

    def load(self) -> None:
        self.guard.make_room_for((), nobody)
        self.guard.check_weights((), nobody)
        for rank, need in enumerate(self.check.memory(())):
            self._take(rank, need.weights)

    def run(self, number: int = 1) -> None:
        """A PipeFusion run, until its first call."""
        conditioning = Conditioning(
            number, TokenLayout((64, 64)), TokenOrder(4096, 64), PROMPT, 1, {"context": torch.zeros(1, PROMPT, 1)}
        )
        self.guard.watch(1, 4, True, nobody)
        self.guard.check(1, conditioning)

    def make_room(self, device: str, missing: int) -> int:
        self.asked.append((device, missing))
        index = int(device[-1])
        before = self.cuda.free(index)
        if self.gives and index == 0:
            freed = min(missing, self.resident)  # of a text encoder, as much as is needed
            self.resident -= freed
            self.cuda.hold(-freed)
            self.cuda.empty_cache()
        return self.cuda.free(index) - before

    def _take(self, rank: int, size: int) -> None:
        self.cuda.hold_elsewhere(size, rank)
        self.ranks[rank] += size

    def _ask(self, message, _reply) -> Future:
        assert message == m.ReadMemory()
        future: Future = Future()
        future.set_result(
            [
                m.DeviceMemoryReport(rank, device, self.cuda.free(rank), self.ranks[rank], 0, self.cuda.cards[rank].memory)
                for rank, device in enumerate(DEVICES)
            ]
        )
        return future


def test_a_text_encoder_gives_way_and_nothing_is_refused(flux):
    with fake_cuda(ADA, ADA) as cuda:
        host = Host(cuda, flux, TEXT_ENCODER)
        host.load()
        host.run()
        need = host.check.memory((expected_request(flux, LATENT, 1, PROMPT, KV_COPIES, 4),))[0]
        assert {device for device, _ in host.asked} == {"cuda:0"}  # the other card has room
        assert 0 < host.resident < TEXT_ENCODER  # and no more of it went than was needed
        assert cuda.free(0) >= need.run / USABLE_MEMORY - 1
        host.guard.watch(1, 4, True, nobody)
        asked = len(host.asked)
        host.run(2)
        assert len(host.asked) == asked  # what is free is asked for once


def test_the_same_run_is_refused_where_room_is_made_for_the_weights_alone(flux):
    """The control: so it was while ComfyUI was told of nothing else."""
    with fake_cuda(ADA, ADA) as cuda:
        host = Host(cuda, flux, TEXT_ENCODER)
        host.load()
        host.gives = False
        with pytest.raises(ValueError, match=r"latent_image: this run needs about .* GB more on cuda:0") as refused:
            host.run()
        assert "stage_split 15,42" in str(refused.value)  # the second card has room for more of the blocks


# What blocks are timed with and cut by.


def test_a_stage_leaves_room_for_what_the_run_keeps(flux):
    """A card of 24 GB and one of 16 GB, equally fast: by weights alone the second one could have half of the blocks."""
    lists, sizes = block_lists(flux), model_sizes(flux, "bf16", "cuda:0")
    expected = expected_request(flux, LATENT, 1, PROMPT, KV_COPIES, 4)
    blocks = {"double_blocks": (2.0, 0.6), "single_blocks": (1.0, 0.3)}
    probes = [m.Probed(rank, blocks, (0.1, 0.1), free) for rank, free in enumerate((23 * 10**9, 15 * 10**9))]
    kept = bytes_by_block(sizes, TWO, (expected,))
    found = {
        "weights": divide(TWO, lists, list(sizes.block_bytes), probes),
        "the run": divide(TWO, lists, kept, probes, other_bytes=bytes_outside_blocks(sizes, TWO, expected)),
    }
    needs = {name: memory_of(sizes, TWO, balance.stage_blocks, 1, (expected,)).total for name, balance in found.items()}
    assert needs["the run"] <= USABLE_MEMORY * 15 * 10**9 < needs["weights"]
