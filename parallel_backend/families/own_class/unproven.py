"""The error of a call that no trial has proven."""


class Unproven(Exception):
    """A call is not what the trial has seen, or the trial has not proven it. The text says what differs."""
