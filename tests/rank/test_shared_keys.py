"""Keys that several query heads share are on the ranks once, where no rank has only some of these heads."""

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.memory_guard import request_of
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.memory_model import KV_COPIES
from testing import tiny
from testing.cases import krea2
from testing.models import conditioning_of

pytestmark = pytest.mark.threads

CASE = krea2.CASES[0]  # 4 heads, 2 of keys
KEPT = {
    Degrees(pipe=2, ulysses=2): 2,
    Degrees(ring=2, ulysses=2): 2,
    Degrees(ring=2, tensor=2): 2,
    Degrees(ulysses=3): 3,  # the second and the third rank have a head each of two that share
}
"""Degrees -> heads of keys that ranks keep, of the 4 that the class makes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model = CASE.model()
    return model, CASE.save(model, tmp_path_factory.mktemp("shared keys") / "krea2.safetensors")


@pytest.mark.parametrize("degrees", KEPT, ids=str)
def test_in_calls_and_in_bands(made, pools, degrees):
    model, path = made
    given = x, _, tensors = CASE.inputs()
    remote = pools.load(path, degrees)
    with torch.inference_mode():
        expected = CASE.reference(model, *given)
    assert tiny.relative(remote.predict(ModelCall(*given), lambda: None), expected) <= 1e-5
    stats = sample_in_bands(remote, x, linear_sigmas(3), Prompt(tensors, {}, 1.0), 2, 1)[1]
    grid = remote.family.patching.grid(tuple(x.shape))
    request = request_of(conditioning_of(remote, grid, tensors), remote.family, KV_COPIES, 2)
    found = [rank.buffer_bytes for rank in stats]
    assert found == [memory.buffers for memory in remote._memory.memory_check.memory((request,))]
    layers, token = krea2.CONFIG["num_layers"], remote.family.sizes.hidden(krea2.CONFIG) * 4
    whole = 2 * KV_COPIES * len(x) * (request.image + request.text) * token * layers
    assert sum(found) == whole * degrees.ring * KEPT[degrees] // 4  # each rank of a ring keeps all tokens
