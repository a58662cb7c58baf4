"""Ranks give way to a text encoder on their card, by as much as ComfyUI asks for, and read nothing from disk for it."""

import pytest

from testing import mini

pytestmark = pytest.mark.comfyui

DEEP = mini.IN_COMFYUI | {"width": 128, "single_blocks": 20}
"""24 MB, 13 of them on the first rank, in blocks of 1 and 2.4 MB."""
CARD = 17_000_000
BLOCK = 2_400_000
LAYERS = 7, 12
"""Of the text encoders on either card, 0.66 MB each: 4.6 MB and 7.9 MB."""


@pytest.fixture(scope="module")
def found(inside, base):
    path = base / "models" / "diffusion_models" / "deep.safetensors"
    mini.save(mini.random_model(DEEP), path)
    yield inside.run("giving_way", name=path.name, size=CARD, layers=LAYERS)[0]
    path.unlink()


@pytest.fixture(params=[0, 1])
def case(request, found):
    """(card of the encoder, the other card, what was seen of each prompt)."""
    got = found[f"on card {request.param}"]
    assert "error" not in got, got["traceback"]
    return request.param, 1 - request.param, got["prompts"]


def test_the_rank_on_that_card_hands_over_what_is_asked_and_takes_it_back(case):
    card, other, prompts = case
    wanted = prompts[0]["after"]
    for prompt in prompts[1:]:
        assert prompt["before"] == prompt["after"] == wanted
        assert prompt["during"][other] == wanted[other]
        asked, freed = prompt["given"][-1][1:]
        assert 0 < min(asked, wanted[card]) <= freed
        assert freed < asked + BLOCK
        assert prompt["during"][card] == wanted[card] - freed


def test_the_encoder_fits_on_its_card_and_the_pictures_are_the_same(case):
    _, _, prompts = case
    for prompt in prompts:
        assert prompt["free"][0] >= 0
        assert prompt["difference"] == 0
