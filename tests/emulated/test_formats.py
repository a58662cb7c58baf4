"""Files of packed formats on emulated devices: they give what CPU ranks give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.campaigns.transport.cases import nothing
from tests.checkpoints.test_formats import CONFIG, dtype_of, files, whole  # noqa: F401 (fixtures)
from tests.support.cpu_and_gpu import Both

pytestmark = [pytest.mark.threads, pytest.mark.slow]

GIVEN = mini.inputs(CONFIG)


@pytest.mark.parametrize("what", ["GGUF Q8_0", pytest.param("scaled, new, by row", marks=pytest.mark.full)])
def test_every_format(both: Both, files, what):  # noqa: F811
    path, dtype = files(what)[0], dtype_of(what)
    dtype = dtype if "/" in dtype or dtype == "fp32" else f"{dtype}/fp32"  # alone it would be bf16 on a card

    def run(load: Callable[..., RemoteTransformer], _pool: Callable[[int], Any]) -> list[torch.Tensor]:
        return [load(mini.opened(path), Degrees(pipe=2), dtype=dtype).predict(ModelCall(*GIVEN), nothing)]

    both.check(run)
