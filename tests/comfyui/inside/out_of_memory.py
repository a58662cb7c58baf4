"""A rank's device runs out of memory in the middle of a run. Run by serve.py.

The devices are emulated, in ranks of processes of their own. Each case has a cut of its own, of which nothing is known.
"""

import functools

from boot import Results, Told, difference, ksampler, node, parallel, random_prompts, torch

ENOUGH, RATE = 1 << 30, 1e9
STEPS = 6


def main(results: Results, name: str) -> None:
    from parallel_backend.client.registry import registry
    from parallel_backend.processes.local import LocalRanks
    from testing.emulated_device import EmulatedDevice
    from testing.full_device import full

    told, started = Told(), []
    prompts = random_prompts(7, 5)
    empty = torch.zeros(1, 16, 16, 16)

    def from_now_on(entry=None) -> None:
        """New ranks, whose main function is `entry`."""
        registry().close()
        started.clear()
        told.texts.clear()

        def start_of(devices):
            started.append(devices)
            return functools.partial(LocalRanks, entry=entry)

        registry().start_of = start_of

    def run(model) -> torch.Tensor:
        return ksampler(model, prompts, empty, steps=STEPS)

    def tried(model) -> dict[str, object]:
        """On ranks that work, then twice on ranks that run out while they have all weights on their device."""
        from_now_on()
        expected = run(model)
        from_now_on(functools.partial(full, EmulatedDevice(ENOUGH, RATE), False))
        first, pools = run(model), len(started)
        second = run(model)
        return {
            "differences": [difference(expected, each) for each in (first, second)],
            "pools": (pools, len(started)),
            "limits": registry().present().resident.limits,
            "told": [text for text in told.texts if "ran out of memory. " in text],
        }

    def in_vain(model) -> dict[str, object]:
        from_now_on(functools.partial(full, EmulatedDevice(ENOUGH, RATE), True))
        try:
            run(model)
        except RuntimeError as error:
            return {"text": str(error), "pools": len(started)}
        return {"text": "no error", "pools": len(started)}

    def banded(model):
        return node("ApplyPipeFusion", model, 2, 1, True)

    results.case("bands", lambda: tried(banded(parallel(name, stage_split="1,4"))))
    results.case("in vain", lambda: in_vain(banded(parallel(name, stage_split="4,1"))))
    registry().close()
