"""Tokens of references in bands of a class: each band has its share of them."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.own_class import OwnLatent
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.built.built_class import built_class
from parallel_backend.own_class.calls.call_arguments import LATENTS, to_tensors
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.cuts.band_tokens import BandTokens, class_numbers, numbers
from parallel_backend.own_class.trials.trial import trial
from tests.own_class.test_own_class import nested
from tests.own_class.test_own_class_bands import ALONE, ATTENDS, MIXED, OTHER, SOUND, call
from tests.support.planted_comfyui import planted

pytestmark = pytest.mark.usefixtures("comfyui")


AHEAD = 1, 2, 3
"""Size of the picture that one class has before its latent."""
NOT_APART = "references before and after its latent are not separate arguments"
ROWS, WORDS = 3 * 4 + 2 * 2, 5
"""Tokens of both references, and of the text."""


def referring(given: Call) -> Call:
    g = torch.Generator().manual_seed(3)
    pictures = [torch.randn(len(given.x), 4, *sides, generator=g) for sides in ((1, 3, 4), (1, 2, 2))]
    ahead = torch.randn(len(given.x), 4, *AHEAD, generator=g)
    return replace(given, named={**given.named, "ref_latents": pictures, "ahead": ahead})


def proof(name: str, given: Call | None = None):
    return trial(planted(name), referring(given or call()), (1.0,), sequence=False, bands=True)


def latent(*layout: str, words: bool = True, before: bool = False) -> OwnLatent:
    return replace(ALONE, words=words, before=before, layout=layout)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Refers", latent("latent", "references", words=False)),
        ("WordsReferences", latent("words", "references", "latent", before=True)),
        ("LatentBetween", latent("words", "latent", "references", before=True)),
    ],
)
def test_references_are_found_and_proven(name, expected):
    found = proof(name)
    assert (found.stages, found.bands, replace(found.latent, shared=(), idle=())) == ("", "", expected)
    own = replace(planted(name), blocks=found.blocks, latent=found.latent)
    tensors = to_tensors(referring(call()).named, call().timestep, call().x.shape[1:])
    counted = built_class(own).counted((3, 4, 6), 1, tensors)
    assert counted.references == ROWS
    assert counted.text == sum(tokens for _, tokens in counted.streams) == (WORDS if expected.words else 0)


def test_references_on_both_sides_are_proven():
    found = proof("Ahead")
    expected = replace(latent("references", "latent", "references", words=False), ahead="ahead")
    assert (found.stages, found.bands, replace(found.latent, shared=(), idle=())) == ("", "", expected)


def test_references_beside_words_and_sound_are_proven():
    found = proof("SoundAndReferences", nested(1))
    layout = "words", "references", "companion", "latent"
    expected = replace(ALONE, words=True, before=True, companion=SOUND, layout=layout)
    assert (found.bands, replace(found.latent, shared=(), idle=())) == ("", expected)
    given = referring(nested(1))
    own = replace(planted("SoundAndReferences"), blocks=found.blocks, latent=found.latent)
    counted = built_class(own).counted((3, 4, 4), 1, to_tensors(given.named, given.timestep))
    assert (counted.references, counted.text) == (ROWS, WORDS + 10)
    assert len(given.named[LATENTS]) == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LatentInReferences", MIXED),
        ("LatentInReferencesLate", ATTENDS),
        ("ReferencesBehind", OTHER),
        ("Interleaved", MIXED),
        ("AheadTwice", NOT_APART),
        ("AheadBehindLate", ATTENDS),
        ("RegisterBetween", "other tokens come both before and after its latent's"),
    ],
)
def test_what_goes_wrong_with_references_is_not_proven(name, why):
    found = proof(name)
    assert found.latent is None
    assert found.bands.startswith(why), found.bands


def beside(name: str, x: torch.Tensor):
    """Its proof, with a picture of the latent's size at the latent's right."""
    given = replace(call(), x=x, named={**call().named, "image_cond": torch.randn(x.shape)})
    own = replace(planted(name), video=x.ndim == 5)
    return own, trial(own, given, (1.0,), sequence=False, bands=True), given


def test_a_picture_beside_the_latent_is_cut_with_its_rows():
    own, found, given = beside("Beside", torch.randn(1, 4, 6, 5))
    expected = replace(latent("latent", "references", words=False), beside=True)
    assert (found.bands, replace(found.latent, shared=(), idle=())) == ("", expected)
    tensors = to_tensors(given.named, given.timestep, given.x.shape[1:])
    counted = built_class(replace(own, blocks=found.blocks, latent=found.latent)).counted((6, 5), 1, tensors)
    assert (counted.references, counted.text) == (6 * 5, 0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("BesideLeft", "tokens that are not references are between its latent's rows"),
        ("LatentBeside", MIXED),
        ("LatentBesideLate", ATTENDS),
    ],
)
def test_what_goes_wrong_with_a_picture_beside_is_not_proven(name, why):
    _, found, _ = beside(name, torch.randn(1, 4, 6, 5))
    assert found.latent is None
    assert found.bands.startswith(why), found.bands


@pytest.mark.parametrize("along", ["rows", "frames"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("layout", "others", "ahead"),
    [
        (("words", "references", "companion", "latent"), (3, 5), 0),
        (("references", "latent", "references"), (0, 0), 4),
    ],
)
def test_bands_and_ranks_have_each_token_once(along, ranks, layout, others, ahead):
    """And the K/V buffer has each where a mask of all keys has it."""
    grid = (2, 3, 4)
    order = TokenOrder(24, 8 if along == "rows" else 12, 7, along)
    whole = BandTokens(latent(*layout), order, order.span, class_numbers(order, grid), companion=others[0], ahead=ahead)
    tokens, cut = {0: 24 + 7 + sum(others)}, SequenceCut((1.0,), ranks, repeat_text=False)
    place_of: dict[int, int] = {}
    for rows in (Span(0, 1), Span(1, 2)) if along == "frames" else (Span(0, 1), Span(1, 3)):
        band = replace(whole, band=order.of_rows(rows))
        kept = [
            numbers(part.rows, torch.device("cpu"))
            for of_rank in band.parts(0, tokens, cut)
            for part in of_rank
            if part.is_kept
        ]
        stand_ins = sum(len(part.place) for of_rank in band.parts(0, tokens, cut) for part in of_rank if not part.is_kept)
        assert stand_ins == (ranks if rows.start and any(others) else 0)
        pieces = band.pieces([0], tokens, cut, range(ranks))
        places = torch.cat([torch.arange(place.start, place.stop) for _, place in pieces])
        place_of |= dict(zip(torch.cat(kept).tolist(), places.tolist(), strict=True))
    in_buffer = whole.in_buffer([0], tokens, torch.device("cpu"))
    assert [place_of[row] for row in in_buffer.tolist()] == list(range(tokens[0]))
