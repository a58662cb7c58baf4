"""The trial of a second text: what it proves, and that it sees what would be wrong on ranks."""

import pytest
import torch

from parallel_backend.own_class.cuts.guided_attention import normalized
from parallel_backend.own_class.trials.change_trial import SETTINGS, Shown, TrialOfSecondText
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class import call
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")

TIMES = 900.0, 1.0
OF_ENTRIES = torch.tensor([SETTINGS, (*SETTINGS[:2], 0.0)])
"""The first entry of two is guided."""


def node(module, second):
    """As KJNodes' WanVideoNAG."""

    def forward(x, context, before=0):
        out = module.looked(x, context[:, before:])
        positive, away = (each[:, :, None] for each in (out[:1], module.looked(x, second.expand(len(x), -1, -1))[:1]))
        return module.o(torch.cat((normalized(positive, away, *SETTINGS)[:, :, 0], out[1:])))

    return forward


def led_away(name: str, tensor: int = 1, cut: bool = True, settings: torch.Tensor = OF_ENTRIES) -> Shown:
    """`cut`: tokens are cut in the proof."""
    proof = trial(planted(name), call(), TIMES, sequence=cut, bands=cut, tensor=tensor)
    assert (proof.stages, proof.batch) == ("", "")
    assert not cut or (proof.sequence, proof.bands) == ("", "")
    assert not proof.tensor or tensor == 1
    return TrialOfSecondText(planted(name), proof, call(), TIMES, tensor, settings=settings, node=node).shown()


def test_a_second_text_that_ranks_look_at_as_the_node_does_is_proven():
    assert led_away("Looks") == Shown(has_effect=True)
    assert led_away("Looks", tensor=2) == Shown(has_effect=True)


GIVES = "ranks that guide it give a different result"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PadsText", GIVES),
        ("PadsTextLate", GIVES),
        ("MasksText", "its attention to the prompt is not a call over [B, S, C] without a mask"),
    ],
)
def test_a_second_text_that_ranks_would_get_wrong_is_not_proven(name, why):
    found = led_away(name)
    assert why in found.why, found


def test_entries_that_the_node_leaves_alone_are_told_apart():
    assert GIVES in led_away("Looks", settings=OF_ENTRIES.flip(0)).why


def test_values_that_are_made_with_all_tokens_are_seen_if_none_are_cut():
    assert GIVES in led_away("ValuesOfLatent", cut=False).why
