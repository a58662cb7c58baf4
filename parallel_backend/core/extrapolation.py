"""Extrapolation of stale keys and values, along the line through the last two calls."""

RATIO_LIMITS = (-1.0, 2.0)
"""Limits of `step_ratio`. At -1 the line gives the values of the call before the last."""


def step_ratio(before: float, last: float, now: float) -> float:
    """Distance from timestep `last` to `now` in units of the distance from `before` to `last`, clamped to RATIO_LIMITS."""
    return min(max((now - last) / (last - before), RATIO_LIMITS[0]), RATIO_LIMITS[1])
