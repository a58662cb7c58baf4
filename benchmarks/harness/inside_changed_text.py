"""Prompts with a text of their own each, whose encoder and ranks share a card. ComfyUI's Python runs it for changed_text.py.

Arguments: those of testing/comfyui/inside/boot.py. A line of standard input has those of `measure`, as JSON; a line of
standard output has what came of it. All else that is printed goes to standard error.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

REPLIES = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent / "inside"), str(HERE.parents[2] / "testing" / "comfyui" / "inside")]

import boot  # noqa: E402
import psutil  # noqa: E402
from boot import BASE, comfy, torch  # noqa: E402
from cards import CARDS, Encoder, cards, spoiled  # noqa: E402


def memory() -> list[int]:
    """Proportional bytes of this process and of the ranks, in the order of their start."""
    ranks = sorted(psutil.Process().children(recursive=True), key=lambda process: (process.create_time(), process.pid))
    return [process.memory_full_info().pss for process in (psutil.Process(), *ranks)]


def cpu_seconds() -> float:
    """Of this process and of the ranks."""
    processes = (psutil.Process(), *psutil.Process().children(recursive=True))
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def away() -> int:
    """Bytes of the first rank's blocks that have to come back to its card."""
    weights = registered().resident
    return weights.wanted[0] - weights.device_bytes[0]


def registered() -> Any:
    """The model on ranks."""
    from parallel_backend.client.registry import registry

    return registry().present()


def first_step(model: Any, text: torch.Tensor, side: int, steps: int) -> tuple[float, torch.Tensor]:
    """(time at which the first step was done, samples)."""
    prompt = [[text, {"pooled_output": torch.zeros(1, 32)}]]
    noise = torch.randn(1, 16, side, side, generator=torch.Generator().manual_seed(0))
    done: list[float] = []
    samples = comfy.sample.sample(
        model,
        noise,
        steps,
        1.0,
        "euler",
        "simple",
        prompt,
        prompt,
        torch.zeros_like(noise),
        callback=lambda *_: done.append(time.perf_counter()),
        disable_pbar=True,
        seed=0,
    )
    return done[0], samples


@torch.inference_mode()
def measure(
    file: str, degrees: dict[str, int], sizes: dict[str, int], layers: int, rate: float, side: int, prompts: int
) -> dict[str, Any]:
    """`sizes`: case -> bytes of a card. `rate`: bytes per second between a card and host memory. By case and prompt: seconds
    until the first step is done, of these the encoder's; CPU seconds of all processes; bytes of the first rank's weights
    that have to come back; bytes of weights on each card before and after encoding and at the end; `memory` at the end.
    Once the first prompt is done nothing can be read from the file."""
    from comfy_execution.utils import CurrentNodeContext

    from parallel_backend.client.registry import registry
    from testing.emulated_device import EmulatedDevice, start_with

    path, found = BASE / "models" / "diffusion_models" / file, {}
    pictures: dict[str, list[torch.Tensor]] = {}
    for case, size in sizes.items():
        registry().close()
        device = EmulatedDevice(size, rate)
        registry().start_of = lambda devices, device=device: start_with(device)
        with cards(size, lambda card: 0):
            model = boot.parallel(file, **degrees, devices=",".join(map(str, CARDS)), stage_split="even")
        encoder, rows = Encoder(CARDS[0], layers), []

        def held(card: torch.device, key: Any = model.model.diffusion_model.setup) -> int:
            return registry().models.bytes_on(key, str(card))

        with cards(size, lambda card, own=encoder: held(card) + own.bytes_on(card)), ExitStack() as later:
            for number in range(prompts):
                before, cpu, began = [held(card) for card in CARDS], cpu_seconds(), time.perf_counter()
                with CurrentNodeContext("prompt", "node"):
                    text = encoder([number, 1, 2, 3])
                encoded, during = time.perf_counter(), [held(card) for card in CARDS]
                back = away() if number else 0
                done, samples = first_step(model, text, side, 2)
                pictures.setdefault(case, []).append(samples)
                rows.append(
                    {
                        "seconds": done - began,
                        "encoder_seconds": encoded - began,
                        "cpu_seconds": cpu_seconds() - cpu,
                        "back": back,
                        "on_the_cards": [before, during, [held(card) for card in CARDS]],
                        "memory": memory(),
                    }
                )
                if number == 0:
                    later.enter_context(spoiled(path))
            registry().unload()
        found[case] = rows
    first, *others = pictures.values()
    equal = all(all(map(torch.equal, first, other)) for other in others)
    registry().close()
    return {"cases": found, "equal": equal}


def main() -> None:
    torch.set_num_threads(1)
    boot.load_pack(boot.PACK)
    from parallel_backend.client.registry import registry

    registry().threads = 1
    print(json.dumps(measure(**json.loads(sys.stdin.readline()))), file=REPLIES, flush=True)


if __name__ == "__main__":
    main()
