"""Blocks are timed with weights packed as the file has them."""

import pytest
import torch

from parallel_backend.checkpoints.open_model import open_own_class
from parallel_backend.checkpoints.packed_formats import Fp8, GgufBlocks, Half
from parallel_backend.client.measurements import probe_of
from parallel_backend.rank.block_probe import probe
from testing import mini
from tests.checkpoints.test_formats import make_gguf

PACKABLE = mini.CONFIG | {"context_width": 64, "pooled_width": 64}
"""Of sides that every format can hold."""


def timed(path, dtype):
    """Blocks of a file of the mini class, timed on a rank."""
    message, _ = probe_of(mini.opened(path), dtype, (4, 1))
    return probe(0, open_own_class(path, message.own_class), torch.device("cpu"), dtype, message.calls)


@pytest.fixture
def expanded(monkeypatch) -> set[str]:
    """Formats that were expanded."""
    kinds: set[str] = set()
    for packing in (Fp8, Half, GgufBlocks):

        def noting(self, packed, dtype, expand=packing.expand):
            kinds.add(self.kind)
            return expand(self, packed, dtype)

        monkeypatch.setattr(packing, "expand", noting)
    return kinds


@pytest.mark.parametrize(
    ("file", "dtype", "kinds"),
    [("bf16", "fp32", set()), ("bf16", "fp8_e4m3fn", {"fp8_e4m3fn"}), ("Q8_0", "fp32", {"Q8_0"})],
)
def test_packed_weights_are_expanded_while_blocks_are_timed(mini_file, mini_model, tmp_path, expanded, file, dtype, kinds):
    path = mini_file
    if file != "bf16":
        path = tmp_path / "model.gguf"
        make_gguf(path, file, dict(mini.random_model(PACKABLE).state_dict()))
    found = timed(path, dtype)
    assert expanded == kinds
    assert all(seconds > 0 for times in found.blocks.values() for seconds in times)
