"""How the spans of a rank's timeline are labelled."""

WORK, TRANSFER, WAIT = range(3)
"""Kinds of spans: a micro-step from its first to its last operation, waits included; a transfer from its start until it
has been waited for; the rank standing still for one."""


StepLabel = tuple[int, int, int, int]
"""A micro-step's number, its tokens' start and stop, and 1 where it is whole and reads no old keys."""


OUTSIDE: StepLabel = (0, 0, 0, 0)
"""Between micro-steps."""
