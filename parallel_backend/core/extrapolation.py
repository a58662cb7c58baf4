"""How far stale keys and values are moved on along the line through the last two calls."""

RATIO_LIMITS = (-1.0, 2.0)
"""How far to extrapolate, in units of the last two calls' distance; -1 is back to the call before."""


def step_ratio(before: float, last: float, now: float) -> float:
    """The way from `last` to `now` in units of that from `before` to `last`, within RATIO_LIMITS."""
    return min(max((now - last) / (last - before), RATIO_LIMITS[0]), RATIO_LIMITS[1])
