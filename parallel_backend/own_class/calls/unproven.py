"""The error of a call that no trial has proven, and errors of a class in words."""


class Unproven(Exception):
    """The class runs in another way than in its trial, or the trial cannot prove it. The text says what differs."""


def first_line(error: Exception) -> str:
    """Type and first line of an error of a class, whose code is not known."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
