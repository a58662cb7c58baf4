"""The error for a call that no trial has proven, and the text for errors of a class."""


class Unproven(Exception):
    """Raised if the class runs otherwise than in its trial, or if a trial cannot prove it. The text says what differs."""


def first_line(error: Exception) -> str:
    """Return the type and first line of an error that the class's code raised."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
