"""What files say is repeated in one line, clipped, and without signs that act on a terminal."""

import pytest

from parallel_backend.core.short_text import MOST, short

HOSTILE = {
    "\x1b[2J\x1b[31mred": r"\x1b[2J\x1b[31mred",
    "a\nERROR: forged": r"a\nERROR: forged",
    "\r": r"\r",
    "\u202egnp.elif": r"\u202egnp.elif",
    "\u200b\ufeff": r"\u200b\ufeff",
    "\ud800": r"\ud800",
    "double_blocks.0.img_attn": "double_blocks.0.img_attn",
    "模型 ü": "模型 ü",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_signs_are_escaped_and_letters_stay(text):
    assert short(text) == HOSTILE[text]
    assert short(text).isprintable()


def test_it_is_clipped_however_it_is_escaped():
    assert short("x" * 10**6) == "x" * MOST + "..."
    assert len(short("\u202e" * 10**6)) == MOST + 3
    assert short("x" * MOST) == "x" * MOST
    assert short([1, 2]) == "[1, 2]"
