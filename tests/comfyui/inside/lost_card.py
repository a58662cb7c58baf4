"""A rank is killed, hangs or runs out of memory in a step of a run. Run by serve.py.

Each run is held against one with the same noise on ranks that do not fail. In bands what is computed again is exact, so
that run computes the same calls again.
"""

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import latent_preview
from boot import Results, Told, comfy, difference, ksampler, node, parallel, random_prompts, sequence, torch

SILENCE = 8.0
ROOM = 1 << 30
"""Bytes of each rank's emulated device: for all weights."""
ACTS = {"killed": "kill", "hangs": "sleep", "out of memory": "run_out"}
TOLD = ("The run goes on with", "One more try", "was computed again")
STALL = 4.0
"""Seconds without progress after which ranks of these runs hang."""


def model_of(name: str, mode: str, ranks: int) -> Any:
    """The MODEL in a mode of so many CPU ranks."""
    on = functools.partial(parallel, name, devices=",".join(["cpu"] * ranks), stage_split="even")  # one way at each load
    match mode:
        case "ulysses" | "ring":
            return on(1, config=sequence(**{mode: ranks}))
        case "tensor":
            return on(1, tensor=ranks)
        case "split batch":
            return on(1, batch=ranks)
        case "stages":
            return on(ranks)
        case "stages with a LoRA":
            return with_lora(on(ranks))
        case "pipefusion":
            return node("ApplyPipeFusion", on(ranks), ranks, 1, True)
        case "displaced":
            return on(1, config=sequence(1, 1, "displaced", ranks))
    raise AssertionError(mode)


def with_lora(model: Any) -> Any:
    """The MODEL with a LoRA of one layer, by ComfyUI's own loader."""
    layer, g = "diffusion_model.double_blocks.0.img_attn.proj", torch.Generator().manual_seed(1)
    width, _ = model.model.diffusion_model.img_in.weight.shape
    shapes = {"lora_A": (4, width), "lora_B": (width, 4)}
    lora = {f"{layer}.{name}.weight": torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]


def main(results: Results, name: str, runs: dict[str, tuple[str, int, str, str, int, int]]) -> None:
    """`runs`: by name (mode, ranks, sampler, kind of failure, step of it from 1 on, steps)."""
    from parallel_backend.client import registry as registry_module
    from parallel_backend.client.pipefusion.banded_run import BandedRun
    from parallel_backend.client.registry import registry
    from parallel_backend.processes.local import LocalRanks
    from parallel_backend.processes.pool import Pool, RankLost
    from testing.acting_rank import acting
    from testing.emulated_device import EmulatedDevice, worker_on

    told, started = Told(), []
    prompts, empty = random_prompts(7, 7), torch.zeros(1, 16, 16, 16)

    class Impatient(Pool):
        def __init__(self, devices, **named):
            super().__init__(devices, **named | {"threads": 1, "silence": SILENCE})
            self.watchdog.stall, self.watchdog.first, self.watchdog.factor = STALL, 60.0, 5.0
            started.append(devices)

    @contextlib.contextmanager
    def at_step(step: int, act: Callable[[], None]) -> Iterator[None]:
        """Context in which `act` is called when ComfyUI begins the sampler's `step`."""

        def prepare(*_arguments, **_named):
            return lambda index, *_others: act() if index + 2 == step else None

        if step == 1:
            act()
        with mock.patch.object(latent_preview, "prepare_callback", prepare):
            yield

    def answered(run: BandedRun) -> set[tuple[int, int]]:
        return {key for key, request in run._requests.items() if request.future.done()}

    @functools.cache
    def usual(mode, ranks, sampler, steps) -> Any:
        """The samples of a run that loses nothing."""
        registry().close()
        registry().start_of = lambda _devices: functools.partial(LocalRanks)
        samples = ksampler(model_of(name, mode, ranks), prompts, empty, sampler, steps)
        registry().close()
        return samples

    def lost(mode, ranks, sampler, kind, step, steps) -> dict[str, Any]:
        expected, model, found = usual(mode, ranks, sampler, steps), model_of(name, mode, ranks), {}
        found["setup before"] = str(model.model.diffusion_model.setup.degrees)
        run = functools.partial(ksampler, model, prompts, empty, sampler, steps)
        breaks, go_on = [], BandedRun.go_on

        def noted(self, model, *arguments):
            breaks.append((sorted(answered(self)), sorted(set(self._requests) - answered(self))))
            go_on(self, model, *arguments)
            breaks[-1] = (*breaks[-1], self._alone)

        with tempfile.TemporaryDirectory() as folder:
            orders = Path(folder) / "orders"
            entry = functools.partial(acting, orders, worker=functools.partial(worker_on, EmulatedDevice(ROOM, 1e9)))
            registry().start_of = lambda _devices: functools.partial(LocalRanks, entry=entry)
            run()  # the ranks are warm
            began = time.monotonic()
            run()
            found["seconds of a run that loses nothing"] = time.monotonic() - began
            told.texts.clear()
            started.clear()
            began = time.monotonic()
            with (
                at_step(step, lambda: orders.write_text(f"{ranks // 2} {ACTS[kind]}")),
                mock.patch.object(BandedRun, "go_on", noted),
            ):
                samples = run()
            found["seconds"] = time.monotonic() - began
            found["did not fail"] = orders.exists()
        found |= {
            "told": [text.removeprefix("Parallel DiT: ") for text in told.texts if any(part in text for part in TOLD)],
            "starts": list(started),
            "difference": difference(expected, samples),
            "calls made again": [len(each[1]) for each in breaks],
            "setup after": str(model.model.diffusion_model.setup.degrees),
        }
        if breaks:
            registry().close()
            registry().start_of = lambda _devices: functools.partial(LocalRanks)
            found["difference of bands"] = difference(broken(run, breaks), samples)
        registry().close()
        return found

    def broken(run, breaks):
        """The samples of a run whose ranks live, and which makes the same calls again."""
        ((_, open_calls, alone),) = breaks
        first, gone, opened = open_calls[0], [], BandedRun._open_run
        begin_exact, begin_band = BandedRun._post_exact, BandedRun._post_band

        def stop(self, due) -> None:
            step = due.step
            if not gone and (step.call, 0 if step.band is None else step.band) >= first:
                before = [each for key, each in self._requests.items() if key < first]
                for each in before:
                    each.future.result()
                gone.append(True)
                raise RankLost("")

        def exact(self, due, *arguments):
            stop(self, due)
            return begin_exact(self, due, *arguments)

        def band(self, due, *arguments):
            stop(self, due)
            return begin_band(self, due, *arguments)

        def open_run(self, poll):
            self._alone = self._alone or (bool(gone) and alone)
            return opened(self, poll)

        with (
            mock.patch.object(BandedRun, "_post_exact", exact),
            mock.patch.object(BandedRun, "_post_band", band),
            mock.patch.object(BandedRun, "_open_run", open_run),
        ):
            return run()

    with mock.patch.object(registry_module, "Pool", Impatient):
        for case, arguments in runs.items():
            results.case(case, functools.partial(lost, *arguments))
    registry().close()
