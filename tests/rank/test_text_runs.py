"""A causal text cut into runs of tokens that see the same keys."""

import torch

from parallel_backend.core.spans import Span
from parallel_backend.rank.attention.text_runs import LEAST, TextRun, text_runs


def test_words_are_one_run_and_each_picture_is_one():
    ends = [1, 2, 3, *[3 + LEAST] * LEAST, *[3 + 2 * LEAST] * LEAST, 4 + 2 * LEAST, 5 + 2 * LEAST]
    first, second = Span(3, 3 + LEAST), Span(3 + LEAST, 3 + 2 * LEAST)
    assert text_runs(torch.tensor(ends)) == (
        TextRun(Span(0, 3), 3, False),
        TextRun(first, first.stop, True),
        TextRun(second, second.stop, True),
        TextRun(Span(second.stop, len(ends)), len(ends), False),
    )


def test_a_few_alike_go_with_the_words_and_a_run_sees_what_its_last_tokens_see():
    few = LEAST - 1
    ends = [1, *[1 + few] * few, 2 + few]
    assert text_runs(torch.tensor(ends)) == (TextRun(Span(0, len(ends)), len(ends), False),)
    assert text_runs(torch.tensor([5, 2])) == (TextRun(Span(0, 2), 5, False),)


def test_no_text_has_no_runs():
    assert text_runs(torch.zeros(0, dtype=torch.int64)) == ()
