"""What nodes hold their inputs to."""

import inspect

import pytest
import torch


@pytest.fixture
def checks(module):
    return module("ui.input_checks")


def refuse_odd(count: int | None, words: str | None = "few") -> None:
    if count is not None and count % 2:
        raise ValueError(f"count is {count}, of {words}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": 4}, True),
        ({"count": 3}, "count is 3, of few"),
        ({"count": 3, "words": "many"}, "count is 3, of many"),
        ({"count": None, "words": None}, True),  # links
        ({}, True),  # ComfyUI itself refuses a prompt that lacks an input
        ({"count": 10}, "count: 10 is not between 1 and 8."),
    ],
)
def test_widgets_are_refused_before_anything_runs(checks, given, expected):
    class Node:
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"count": ("INT", LIMITS)}, "optional": {"words": ("STRING", {})}}

        def run(self, count, words="few"):
            pass

    node = checks.validate(early=refuse_odd)(Node)
    assert inspect.getfullargspec(node.VALIDATE_INPUTS).args == ["count", "words"]  # by which ComfyUI picks the values
    assert node.VALIDATE_INPUTS(**given) == expected


LIMITS = {"min": 1, "max": 8}


@pytest.mark.parametrize(
    ("kind", "value", "options", "expected"),
    [
        ("INT", 8, LIMITS, 8),
        ("INT", 1.0, LIMITS, 1),
        ("INT", "5", LIMITS, 5),
        ("FLOAT", 8, LIMITS, 8.0),
        ("BOOLEAN", 1, {}, True),
        ("STRING", "8", {}, "8"),
        (["auto", "even"], "even", {}, "even"),
        ("MODEL", 3, LIMITS, 3),  # of a type that has no check
    ],
)
def test_what_fits_is_given_as_the_inputs_type(checks, kind, value, options, expected):
    found = checks.coerce("name", value, kind, options)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("INT", 9, "9 is not between 1 and 8"),
        ("INT", 0, "0 is not between 1 and 8"),
        ("INT", 2.5, "2.5 is not a whole number"),
        ("INT", None, "None is not a whole number"),
        ("FLOAT", 8.001, "8.001 is not between"),
        ("FLOAT", float("nan"), "nan is not a number"),
        ("FLOAT", float("inf"), "inf is not a number"),
        ("BOOLEAN", 2, "2 is not true or false"),
        ("STRING", 3, "3 is not a text"),
        (["auto", "even"], "odd", "'odd' is not one of auto, even"),
        ("LATENT", {"samples": torch.zeros(1, 4, 0, 8)}, "cannot be used"),
        ("LATENT", torch.zeros(1, 4, 8, 8), "this is not a latent"),
        ("CONDITIONING", [torch.zeros(1, 4)], "this is not a conditioning"),
    ],
)
def test_what_does_not_is_refused_by_the_inputs_name(checks, kind, value, words):
    with pytest.raises(ValueError, match=f"^steps: .*{words}"):
        checks.coerce("steps", value, kind, LIMITS)
