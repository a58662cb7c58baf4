"""Ulysses' values travel first: before queries and keys are computed, to the same outputs bit for bit."""

from collections import Counter
from unittest import mock

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.rank.attention import early_values, parallel_attention, ulysses
from testing.cases import flux

pytestmark = pytest.mark.threads

CASE = flux.CASES[0]
"""Text's values before the image's, then both as one stream."""


def test_before_queries_and_keys(pools, tmp_path):
    path = CASE.save(CASE.model(), tmp_path / "model.safetensors")
    model, given, started = pools.load(path, Degrees(ulysses=3)), CASE.inputs(), Counter()

    def counting(tensors, *rest):
        started[len(tensors)] += 1
        return ulysses.start_sequence_to_heads(tensors, *rest)

    def output(overlap: bool) -> torch.Tensor:
        started.clear()
        with (
            mock.patch.object(early_values, "start_sequence_to_heads", counting),
            mock.patch.object(parallel_attention, "start_sequence_to_heads", counting),
        ):
            return model.predict(ModelCall(*given), lambda: None, overlap=overlap)

    together = output(overlap=False)
    layers = started.pop(3)
    assert not started and layers >= 6
    assert torch.equal(output(overlap=True), together)
    assert started == {1: layers, 2: layers}
