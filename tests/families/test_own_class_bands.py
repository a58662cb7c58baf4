"""The trial of bands of a class that no family computes: which latents' tokens it finds, and what it sees to be wrong."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.own_class import OwnEntry, OwnLatent
from parallel_backend.families.own_class.band_trial import why_not_in_bands
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.proof import Proof
from parallel_backend.families.own_class.trial import trial
from parallel_backend.families.own_class.tried_calls import Call, draw_weights, smaller
from tests.families.test_own_class import nested
from tests.support.planted_comfyui import planted, planted_comfyui


@pytest.fixture(autouse=True)
def comfyui():
    with planted_comfyui():
        yield


def call() -> Call:
    g = torch.Generator().manual_seed(0)
    x, context = torch.randn(1, 4, 3, 4, 6, generator=g), torch.randn(1, 5, 16, generator=g)
    return Call(x, torch.full((1,), 700.0), {"context": context, "control": None})


def proof(name: str) -> Proof:
    return trial(planted(name), call(), (1.0,), sequence=False, bands=True)


ALONE = OwnLatent(stream=0, before=False, patch=(1, 1, 1), words=False, pads=True)
REFINED = replace(ALONE, words=True, again=(OwnEntry(stream=1, before=True, behind=True),))


def test_of_one_list_all_blocks_are_tried_if_a_class_counts_on_them():
    """The model's other blocks, however many, are few in the trial."""
    runs = []
    for name in ("ProjectsWords", "ProjectsWordsDeep"):
        polled: list[float] = []
        found = trial(planted(name), call(), (1.0,), polled.append, bands=True)
        assert (found.stages, found.sequence, found.bands) == ("", "", "")
        runs.append(len(polled))
    assert len(found.blocks) >= 24
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("name", "latent"),
    [
        ("Tokens", ALONE),
        ("SharedKeys", ALONE),
        ("Crossed", ALONE),
        ("OnAxes", ALONE),
        ("PlacesBetween", ALONE),
        ("Between", ALONE),
        ("ChangingWords", replace(ALONE, stream=1, words=True)),
        ("BatchBehind", ALONE),
        ("SkipsToOutput", ALONE),
        ("MasksKeys", ALONE),
        ("MasksAll", ALONE),
        ("TwoRows", replace(ALONE, patch=(1, 2, 2), pads=False)),
        ("RefinesWords", replace(ALONE, before=True, words=True)),
        ("FillsUp", replace(ALONE, words=True)),
        ("FillsUpInACircle", replace(ALONE, patch=(1, 2, 2))),
        ("WordsInFront", replace(ALONE, before=True, words=True)),
        ("TwoStreams", replace(ALONE, stream=1, words=True)),
        ("PictureFirst", replace(ALONE, stream=1, words=True)),
        ("OneBlockFirst", replace(ALONE, stream=1, words=True)),
        ("Refines", REFINED),
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
        ("MakesTable", OUTSIDE | {"blocks.*.mod", "table"}),
        ("AttendsAmongWords", OUTSIDE | {"blocks.*.mod", "blocks.*.words.kv"}),
        ("SharedEarly", set()),
        ("WritesIntoOutput", set()),
    ],
)
def test_bands_share_outputs_of_the_time_and_the_prompt(name, shared):
    found = proof(name)
    assert found.bands == ""
    assert set(found.latent.shared) == shared


@pytest.mark.parametrize(("name", "idle"), [("WordsLayer", ("streams.*.of_words",)), ("TwoStreams", ())])
def test_layers_of_words_are_idle_in_bands_without_words(name, idle):
    found = proof(name)
    assert (found.bands, found.latent.idle) == ("", idle)


def test_bands_of_a_class_that_needs_a_large_latent_are_proven():
    given = call()
    wide = Call(torch.randn(1, 4, 1, 2, 14), given.timestep, given.named)
    found = trial(planted("NeedsColumns"), wide, (1.0,), sequence=False, bands=True)
    assert (found.bands, replace(found.latent, shared=(), idle=())) == ("", ALONE)


def test_times_and_places_of_cells_go_with_the_latent():
    given = call()
    named = {**given.named, "places": torch.rand(1, 3, 2 * 4 * 6, 2)}
    timed = Call(given.x, torch.full((1, 3 * 4 * 6, 1), 700.0), named)
    found = trial(planted("TimePerCell"), timed, (1.0,), bands=True)
    assert (found.stages, found.sequence, found.bands) == ("", "", "")
    less = smaller(timed, 2, 3)
    assert (less.timestep.shape, less.named["places"].shape) == ((1, 2 * 2 * 2, 1), (1, 3, 2 * 2, 2))


MIXED = "its latent's tokens are not in raster order, or are mixed before its blocks"
UNEQUAL = "its tokens have unequal parts of the latent, or are mixed before its blocks"
ATTENDS = "in a band blocks.0 attends to other values where its tokens are cut"
OTHER = "a band gives another result"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PoolsInFront", ATTENDS),
        ("PoolsLatent", ATTENDS),
        ("ScalesLatent", UNEQUAL),
        ("CountsTokens", ATTENDS),
        ("TableOfLatent", ATTENDS),
        ("RowsMixed", MIXED),
        ("FramesMixed", MIXED),
        ("ColumnsMixed", MIXED),
        ("RowsMixedLate", ATTENDS),
        ("ConvolvedInFront", MIXED),
        ("ByColumns", MIXED),
        ("LastRowFirst", MIXED),
        ("Flipped", OTHER),
        ("RowsSwapped", OTHER),
        ("ConvolvedBehind", OTHER),
        ("PoolsBehind", OTHER),
        ("PoolsKnownBehind", OTHER),
        ("PoolsBehindLate", OTHER),
        ("CountsBehind", OTHER),
        ("NextRowBehind", OTHER),
        ("PoolsLatentBehind", OTHER),
        ("SmoothsOutput", OTHER),
        ("ReadsWordsBehind", OTHER),
        ("MovesLaterPatches", ATTENDS),
        ("LatentInTwoStreams", "a part of its latent is in several streams"),
        ("TwoLatentStreams", "a part of its latent is in several streams"),
        ("PooledTokenBehind", MIXED),
        ("OwnBlocksFirst", MIXED),
        ("PoolsRefined", MIXED),
        ("PoolsRefinedLate", ATTENDS),
        ("ScalesRefined", UNEQUAL),
        ("MovesRefined", MIXED),
        ("MixesRefined", MIXED),
        ("PoolsRefinedBehind", MIXED),
        ("CountsRefined", ATTENDS),
        ("WordsInFrontLate", ATTENDS),
        ("ScalesLatentFirst", UNEQUAL),
        # Not of bands alone: a cut of tokens, or stages, are wrong too.
        ("KeepsLatent", "it was not tried"),
        ("NumbersTokens", "blocks.0 attends to other values where its tokens are cut"),
        ("PoolsTokens", "blocks.1 attends to other values where its tokens are cut"),
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
        assert why_not_in_bands(model, right.blocks, right.latent, call()) == ""
        assert why_not_in_bands(model, right.blocks, replace(right.latent, **change), call()) != ""


SOUND = "b a1 a2 a3 -> b (a3) (a1 a2)"


@pytest.mark.parametrize(("name", "before"), [("SoundToo", True), ("Pairs", False)])
def test_a_second_latent_goes_with_the_first_band(name, before):
    found = trial(planted(name), nested(1), (1.0,), sequence=False, bands=True)
    assert (found.stages, found.bands) == ("", "")
    assert replace(found.latent, shared=(), idle=()) == replace(ALONE, before=before, companion=SOUND)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SoundMixedIn", "its second latent is mixed into the first one's tokens before its blocks"),
        ("SoundMixedInLate", ATTENDS),
        ("PictureInSound", MIXED),
        ("SoundInTime", ATTENDS),
        ("SoundBehind", OTHER),
        ("PictureBehindSound", OTHER),
        ("SoundAtOnce", "its second latent's tokens are mixed before its blocks"),
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
