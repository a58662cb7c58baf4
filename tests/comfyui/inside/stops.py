"""KSampler under Apply PipeFusion on the pretend device, in ComfyUI's own code: what stops the host. Run by serve.py."""

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from unittest import mock

from boot import BUNDLED, PACK, Results, comfy, difference, ksampler, node, parallel, torch

STEPS = 4
PLENTY = 1 << 40

spec = importlib.util.spec_from_file_location("pretend_device", PACK / "tests" / "support" / "pretend_device.py")
pretend_device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pretend_device)


@contextlib.contextmanager
def on_pretend_device() -> Iterator[None]:
    """Within it ComfyUI computes on the pretend device, as it would on a GPU."""
    management, device = comfy.model_management, pretend_device.device()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(management, "get_torch_device", lambda: device))
        stack.enter_context(mock.patch.object(management, "get_free_memory", lambda *_, **named: free(**named)))
        yield


def free(torch_free_too: bool = False, **_) -> int | tuple[int, int]:
    return (PLENTY, PLENTY) if torch_free_too else PLENTY


def main(results: Results, samplers: list[str]) -> None:
    prompts = [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    empty = torch.zeros(1, 16, 16, 16)

    def banded():
        return node("ApplyPipeFusion", parallel(BUNDLED, stage_split="even"), 2, 1, True)

    def compare(sampler: str) -> dict:
        expected = ksampler(banded(), prompts, empty, sampler, STEPS)
        with on_pretend_device(), pretend_device.stops() as stops:
            found = ksampler(banded(), prompts, empty, sampler, STEPS)
        return {"difference": difference(expected, found.cpu()), "stops": list(stops)}

    for sampler in samplers:
        results.case(sampler, partial(compare, sampler))
