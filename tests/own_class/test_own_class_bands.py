"""The trial of bands of a class: which latents' tokens it finds, and what it sees to be wrong."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.own_class import OwnEntry, OwnLatent
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.tried_calls import Call, draw_weights
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.band_trial import check_in_bands
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class import nested
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")


def call() -> Call:
    g = torch.Generator().manual_seed(0)
    x, context = torch.randn(1, 4, 3, 4, 6, generator=g), torch.randn(1, 5, 16, generator=g)
    return Call(x, torch.full((1,), 700.0), {"context": context, "control": None})


def proof(name: str) -> Proof:
    return trial(planted(name), call(), (1.0,), sequence=False, bands=True)


ALONE = OwnLatent(stream=0, before=False, patch=(1, 1, 1), words=False, pads=True)
REFINED = replace(ALONE, words=True, again=(OwnEntry(stream=1, before=True, behind=True),))


@pytest.mark.parametrize(
    ("name", "latent"),
    [
        ("Tokens", ALONE),
        ("SharedKeys", ALONE),
        ("Crossed", ALONE),
        ("OnAxes", ALONE),
        ("Between", ALONE),
        ("ChangingWords", replace(ALONE, stream=1, words=True)),
        ("SkipsToOutput", ALONE),
        ("MasksKeys", ALONE),
        ("TwoRows", replace(ALONE, patch=(1, 2, 2), pads=False)),
        ("FillsUp", replace(ALONE, words=True)),
        ("WordsInFront", replace(ALONE, before=True, words=True)),
        ("TwoStreams", replace(ALONE, stream=1, words=True)),
        ("Windowed", replace(ALONE, stream=1, words=True)),
        ("Prefixed", replace(ALONE, before=True, words=True, steady=True)),
        ("Refines", REFINED),
        ("ListsOfModes", replace(ALONE, words=True)),
    ],
)
def test_bands_that_are_right_are_proven(name, latent):
    found = proof(name)
    assert (found.stages, found.bands) == ("", "")
    assert replace(found.latent, shared=(), idle=()) == latent


OUTSIDE = {"time", "text"}


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("Tokens", OUTSIDE | {"blocks.*.mod"}),
        ("Crossed", OUTSIDE | {"blocks.*.mod"}),
        ("ReadsWords", OUTSIDE | {"blocks.*.mod", "blocks.*.words"}),
        ("SharedEarly", set()),
        ("WritesIntoOutput", set()),
    ],
)
def test_bands_share_outputs_of_the_time_and_the_prompt(name, shared):
    found = proof(name)
    assert found.bands == ""
    assert set(found.latent.shared) == shared


@pytest.mark.parametrize(
    ("name", "idle"),
    [
        ("WordsLayer", ("streams.*.of_words",)),
        ("WordsAttend", ("streams.*.to_words", "streams.*.to_picture.q")),  # later bands need the picture's keys
        ("TwoStreams", ()),
    ],
)
def test_modules_of_words_are_idle_in_bands_without_words(name, idle):
    found = proof(name)
    assert (found.bands, found.latent.idle) == ("", idle)


MIXED = "its latent's tokens are not equal parts in raster order, or are mixed before its blocks"
ATTENDS = "in a band blocks.0 attends to different values if its tokens are cut"
OTHER = "a band gives a different result"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PoolsInFront", ATTENDS),
        ("ScalesLatent", MIXED),
        ("CountsTokens", ATTENDS),
        ("RowsMixed", MIXED),
        ("RowsMixedLate", ATTENDS),
        ("LastRowFirst", MIXED),
        ("Flipped", OTHER),
        ("PoolsBehind", OTHER),
        ("PoolsBehindLate", OTHER),
        ("CountsBehind", OTHER),
        ("PoolsLatentBehind", OTHER),
        ("LatentInTwoStreams", "tokens of its latent are in several streams"),
        ("PoolsRefined", MIXED),
        ("PoolsRefinedLate", ATTENDS),
        ("PoolsRefinedBehind", MIXED),
        ("WordsAtTime", "transformer_blocks.0 has different keys for the text in another call"),
        # Not of bands alone: a cut of tokens, or stages, are wrong too.
        ("KeepsLatent", "it was not tried"),
        ("NumbersTokens", "blocks.0 attends to different values if its tokens are cut"),
        ("Right", "its attention cannot be reached"),
    ],
)
def test_what_bands_would_get_wrong_is_not_proven(name, why):
    found = proof(name)
    assert found.latent is None
    assert found.bands.startswith(why), found.bands


@pytest.mark.parametrize("change", [{"stream": 0}, {"before": True}, {"patch": (1, 2, 2)}])
def test_the_latent_of_another_class_is_not_proven(change):
    right = proof("TwoStreams")
    model = build(planted("TwoStreams"))
    draw_weights(model, 0)
    with torch.no_grad():
        check_in_bands(model, right.blocks, right.latent, call())
        with pytest.raises(Unproven):
            check_in_bands(model, right.blocks, replace(right.latent, **change), call())


SOUND = "b a1 a2 a3 -> b (a3) (a1 a2)"


@pytest.mark.parametrize(("name", "before"), [("SoundToo", True), ("Pairs", False)])
def test_a_second_latent_goes_with_the_first_band(name, before):
    found = trial(planted(name), nested(1), (1.0,), sequence=False, bands=True)
    assert (found.stages, found.bands) == ("", "")
    assert replace(found.latent, shared=(), idle=()) == replace(ALONE, before=before, companion=SOUND)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SoundMixedInLate", ATTENDS),
        ("PictureInSound", MIXED),
        ("SoundBehind", OTHER),
    ],
)
def test_a_second_latent_that_is_not_apart_is_not_proven(name, why):
    found = trial(planted(name), nested(1), (1.0,), sequence=False, bands=True)
    assert found.latent is None
    assert found.bands.startswith(why), found.bands


def test_bands_of_a_single_row_are_not_proven():
    given = call()
    single = Call(given.x[:, :, :1, :1], given.timestep, given.named)
    found = trial(planted("Tokens"), single, (), sequence=False, bands=True)
    assert found.latent is None
    assert found.bands == "its latent has a single row of tokens"


def test_pictures_among_steady_words_may_be_at_any_places():
    """A trial has fewer words than the call, and in another prompt they are elsewhere."""
    given, pictures = call(), [torch.randn(1, 4, 1, side, 3) for side in (2, 3)]
    named = given.named | {"ref_latents": pictures, "image_slots": [1, 5]}
    found = trial(planted("Prefixed"), replace(given, named=named), (1.0,), bands=True)
    assert (found.sequence, found.bands, found.latent.layout) == ("", "", ())
    assert found.numbers == ("image_slots/0", "image_slots/1")
