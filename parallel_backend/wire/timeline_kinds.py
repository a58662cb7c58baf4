"""Labels of the spans in a rank's timeline."""

WORK, TRANSFER, WAIT, FETCH = range(4)
"""Kinds of spans. WORK: a micro-step from its first to its last operation, waits included. TRANSFER: a transfer from its
start until the wait for it has ended. WAIT: the rank waits for a transfer. FETCH: the rank waits for weights from host
memory."""

StepLabel = tuple[int, int, int, int]
"""Number of the micro-step, start and stop of its tokens, and 1 if it is exact, else 0."""

OUTSIDE: StepLabel = (0, 0, 0, 0)
"""The label of a span that belongs to no micro-step."""
