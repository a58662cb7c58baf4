"""Ranks on a card that ComfyUI uses give way to a text encoder there, and take the room back. Run by serve.py.

The cards are stand-ins (cards.py), the ranks' devices emulated ones; ComfyUI's model management is its own.
"""

from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

from boot import BASE, Results, comfy, difference, ksampler, parallel, torch
from cards import CARDS, Encoder, cards, spoiled

management = comfy.model_management
RATE = 1e9
"""Bytes per second of a copy."""


def main(results: Results, name: str, size: int, layers: list[int]) -> None:
    """`size`: of a card. `layers`: of the text encoder on each."""
    from comfy_execution.utils import CurrentNodeContext

    from parallel_backend.client.registry import registry
    from parallel_backend.processes.local import LocalRanks
    from testing.change_time import overlook_change_time, rank_entry
    from testing.emulated_device import EmulatedDevice

    overlook_change_time()
    registry().start_of = lambda devices: partial(LocalRanks, entry=rank_entry(EmulatedDevice(size, RATE)))
    file = BASE / "models" / "diffusion_models" / name
    g = torch.Generator().manual_seed(0)
    extras = {"pooled_output": torch.randn(1, 32, generator=g)}
    latent = torch.zeros(1, 16, 16, 16)
    with cards(size, lambda card: 0):
        model = parallel(name, devices=",".join(map(str, CARDS)), stage_split="even")
    assert model.load_device == CARDS[0]
    stub = model.model.diffusion_model

    def held(card: torch.device = CARDS[0]) -> int:
        return registry().bytes_on(stub.setup, str(card))

    def both() -> list[int]:
        return [held(card) for card in CARDS]

    def changed_text(card: torch.device, layers: int) -> dict[str, object]:
        """Three prompts with texts of their own. From the second on nothing can be read from the file."""
        encoder, found, given = Encoder(card, layers), [], []
        give_back = registry().give_back

        def spy(key: object, device: str, nbytes: float) -> int:
            given.append((device, nbytes, freed := give_back(key, device, nbytes)))
            return freed

        with (
            cards(size, lambda at: held(at) + encoder.bytes_on(at)) as free,
            patch.object(registry(), "give_back", spy),
            ExitStack() as later,
        ):
            for number in range(3):
                before = both()
                given.clear()
                with CurrentNodeContext("prompt", "node"):
                    text = encoder([number, 1, 2, 3])
                during, least = both(), free(card)
                prompt = [[text, extras]]
                picture = ksampler(model, (prompt, prompt), latent)
                found.append({"before": before, "during": during, "after": both(), "free": [least, free(card)]})
                found[-1] |= {"given": list(given), "picture": picture}
                if number == 0:
                    later.enter_context(spoiled(file))
            model.detach()
            later.close()
            for number, prompt in enumerate(found):
                text = [[encoder([number, 1, 2, 3]), extras]]
                registry().unload()
                prompt["difference"] = difference(prompt.pop("picture"), ksampler(model, (text, text), latent))
            registry().unload()
        return {"prompts": found}

    for number, card in enumerate(CARDS):
        results.case(f"on card {number}", lambda card=card, number=number: changed_text(card, layers[number]))
