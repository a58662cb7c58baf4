"""Files in packed and in ComfyUI's quantised formats on emulated devices: in fp32 what CPU ranks give.

In bf16 a card multiplies in ComfyUI's formats: every mode is as far from the plain model as one rank on such a card.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from comfy_kitchen.backends.eager import convrot_w4a4, quantization
from comfy_kitchen.tensor import int8_utils

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.campaigns.transport.cases import nobody
from tests.checkpoints import test_formats
from tests.checkpoints.test_formats import whole  # noqa: F401 (fixtures)
from tests.rank.test_quantised_ranks import INPUTS, KINDS, RATIO, files, plain, plain_file  # noqa: F401 (fixtures)
from tests.support.cpu_and_gpu import Both, both_kinds

pytestmark = pytest.mark.threads
packed = test_formats.files


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    caches = [convrot_w4a4._HADAMARD_CACHE, int8_utils._HADAMARD_CACHE, quantization.E2M1_LUT_CACHE]
    with contextlib.ExitStack() as stack:
        for cache in caches:
            stack.enter_context(mock.patch.dict(cache))
        made = stack.enter_context(both_kinds())
        made.caches = caches
        yield made


def on(path, degrees: Degrees, dtype: str, given=INPUTS):
    def run(load: Callable[..., RemoteTransformer], _pool: Callable[[int], Any]) -> list[torch.Tensor]:
        return [load(mini.opened(path), degrees, dtype=dtype).predict(ModelCall(*given), nobody)]

    return run


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [("int8, rotated", Degrees(pipe=2)), pytest.param("nvfp4", Degrees(ulysses=2), marks=pytest.mark.full)],
    ids=str,
)
def test_a_format(both: Both, plain, files, kind, degrees):  # noqa: F811
    path = files(kind)[0]
    both.check(on(path, degrees, "fp32"))
    (alone,), (found,) = (both.on_gpu(on(path, each, "bf16")) for each in (Degrees(), degrees))
    assert mini.relative(found.float(), plain) == pytest.approx(mini.relative(alone.float(), plain), rel=RATIO)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["GGUF Q8_0", pytest.param("scaled, new, by row", marks=pytest.mark.full)])
def test_a_packed_format(both: Both, packed, what):
    both.check(on(packed(what)[0], Degrees(pipe=2), "fp32", mini.inputs(test_formats.CONFIG)))
