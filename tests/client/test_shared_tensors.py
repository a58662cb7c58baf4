"""Memory that a pool's ranks share for a while: which of it they page-lock."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.client.shared_tensors import shared_output, shared_weights
from parallel_backend.wire.shared_memory import sharing_possible


@pytest.mark.skipif(not sharing_possible(), reason="this system shares no memory with ranks")
def test_ranks_page_lock_weights_that_they_read_and_no_picture_that_they_write():
    lent: list[tuple[int, bool]] = []
    pool = SimpleNamespace(
        devices=("cuda:0", "cuda:1"),
        lends_to=lambda rank: True,
        lend=lambda rank, segment, read: lent.append((rank, read)),
        drop=lambda rank, segment: None,
    )
    with shared_output(pool, (1, 3, 64, 64), torch.float32) as (_, shared):
        assert shared
    assert lent == [(0, False), (1, False)]
    lent.clear()
    with shared_weights(pool, {"weight": torch.ones(64)}):
        assert lent == [(0, True), (1, True)]
