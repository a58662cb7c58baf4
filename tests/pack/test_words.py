"""The check of English notices its habits, and no sentence without them."""

import pytest

from scripts.words import HABITS, LONGEST, habits_of

EXAMPLES = dict(
    zip(
        HABITS,
        (
            "It makes a picture.",
            "The card is full.",
            "A video and its sound.",
            "It is copied, where it does not fit.",
            "A list of what was left out.",
            "Two lists, of which one is empty.",
            "This is no latent.",
            "It is loaded anew.",
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_noticed(habit):
    assert list(habits_of(f"First sentence. {EXAMPLES[habit]}")) == [(habit, EXAMPLES[habit])]


def test_a_long_sentence_is_noticed():
    long = " ".join(["word"] * (LONGEST + 1)) + "."
    assert [sentence for _, sentence in habits_of(f"Short. {long}")] == [long]


def test_plain_english_is_left_alone():
    assert not list(habits_of("If there is no such file, the image is made again. `a picture` is code."))
