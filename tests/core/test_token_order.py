"""The order of picture and reference tokens: every token has one place, bands are alike in length, counts agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.core.spans import Span, split
from parallel_backend.core.token_order import TokenOrder, class_order

ORDERS = st.builds(
    lambda rows, row, references: TokenOrder(rows * row, row, references),
    *(st.integers(1, 9), st.integers(1, 7), st.integers(0, 60)),
)


@given(ORDERS)
def test_every_token_has_one_place_and_the_picture_keeps_its_order(order):
    places = order.places(order.span)
    assert sorted(places.tolist()) == list(range(order.tokens))
    for kind in (places < order.image, places >= order.image):
        assert places[kind].tolist() == sorted(places[kind].tolist())


@given(ORDERS, st.data())
def test_images_counts_the_pictures_tokens(order, data):
    start = data.draw(st.integers(0, order.tokens))
    span = Span(start, data.draw(st.integers(start, order.tokens)))
    places = order.places(span)
    own = order.images(span)
    assert places[places < order.image].tolist() == list(range(own.start, own.stop))


@given(ORDERS, st.integers(1, 5))
def test_bands_of_rows_cover_all_tokens_with_their_rows(order, bands):
    rows = split(Span(0, order.image // order.row), bands)
    spans = [order.of_rows(band) for band in rows]
    assert spans[0].start == 0
    assert spans[-1].stop == order.tokens
    for band, span, following in zip(rows, spans, spans[1:], strict=False):
        assert span.stop == following.start
        assert order.images(span) == Span(band.start * order.row, band.stop * order.row)
    per_row = [len(span) / len(band) for band, span in zip(rows, spans, strict=True) if len(band)]
    assert max(per_row) - min(per_row) <= 1


@pytest.mark.parametrize("references", [0, 5])
def test_a_band_of_rows_has_its_rows_of_every_frame_and_one_of_frames_whole_frames(references):
    grid = (3, 4, 2)
    of_rows, of_frames = (TokenOrder(24, row, references, along) for row, along in ((6, "rows"), (8, "frames")))
    assert class_order(grid, "frames") is None
    assert class_order((1, 4, 2), "rows") is None

    def numbers(order, band):
        """Of the picture's tokens in the band, as the class counts them."""
        places = order.places_in_class(grid, order.of_rows(band))
        assert sorted(order.places_in_class(grid, order.span).tolist()) == list(range(24 + references))
        return set(places[places < 24].tolist())

    second_row = {frame * 8 + 2 + column for frame in range(3) for column in range(2)}
    assert numbers(of_rows, Span(1, 2)) == second_row
    assert numbers(of_frames, Span(1, 2)) == set(range(8, 16))
