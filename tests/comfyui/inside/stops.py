"""KSampler under Apply PipeFusion on an emulated GPU, in ComfyUI's own code: what stops the host. Run by serve.py."""

import contextlib
import sys
import types
from collections.abc import Iterator
from functools import partial
from unittest import mock

from boot import BUNDLED, PACK, Results, comfy, difference, ksampler, node, parallel, torch

STEPS = 4
PLENTY = 1 << 40

sys.path.insert(0, str(PACK))
# Some package that ComfyUI needs has installed one of this name, which would be found first: ours has no __init__.py.
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [str(PACK / "tests")]
from tests.support.emulated_gpu import emulated  # noqa: E402
from tests.support.emulated_gpu.machine import Machine  # noqa: E402
from tests.support.fake_cuda import HOPPER  # noqa: E402


@contextlib.contextmanager
def on_gpu() -> Iterator[Machine]:
    """Within it ComfyUI computes on an emulated GPU."""
    management, device = comfy.model_management, torch.device("cuda:0")
    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(emulated(HOPPER))
        stack.enter_context(mock.patch.object(management, "get_torch_device", lambda: device))
        stack.enter_context(mock.patch.object(management, "get_free_memory", lambda *_, **named: free(**named)))
        yield gpus


def free(torch_free_too: bool = False, **_) -> int | tuple[int, int]:
    return (PLENTY, PLENTY) if torch_free_too else PLENTY


def main(results: Results, samplers: list[str]) -> None:
    prompts = [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    empty = torch.zeros(1, 16, 16, 16)

    def banded():
        return node("ApplyPipeFusion", parallel(BUNDLED, stage_split="even"), 2, 1, True)

    def compare(sampler: str) -> dict:
        expected = ksampler(banded(), prompts, empty, sampler, STEPS)
        with on_gpu() as gpus:
            found = ksampler(banded(), prompts, empty, sampler, STEPS)
            return {"difference": difference(expected, found.cpu()), "stops": list(gpus.record.stops)}

    for sampler in samplers:
        results.case(sampler, partial(compare, sampler))
