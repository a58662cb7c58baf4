"""A step cache: model calls whose output can be told from the calls before are not computed but forecast.

Decided in the client's process before anything is sent. A forecast call therefore costs no rank anything, no rank can
decide differently from another, and every mode and family is served alike. A forecast is the line through two computed
outputs of the same conditioning, at the new call's time (as TaylorSeer's first order, arXiv 2503.06923, but on the
model's output and for any spacing); TeaCache (2411.19108) and EasyCache (2507.02860) reuse the last output instead.
docs/decisions.md has the measurements.
"""

from dataclasses import dataclass, field

import torch

from parallel_backend.families.base.patching import Latents

FIRST_COMPUTED = 3
"""Calls of a conditioning that are always computed. Two make a line, and the third says how good it is."""
LONGEST_ROW = 3
"""Calls in a row that may be forecast."""
BASELINE = 2.0
"""The line's two calls are this many times as far apart as it is extended, where there are such: a short one follows their
noise. Never is it extended further than they are apart."""
HISTORY_CALLS = 6
"""Calls of a conditioning whose outputs are kept."""


@dataclass(frozen=True)
class Computed:
    """A call that is computed: its output by band, as it arrives. `time`: the timestep that the model was given."""

    time: float
    outputs: dict[int, Latents] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """A call that is not computed: the weighted sum of outputs of others."""

    terms: tuple[tuple[float, Computed], ...]

    def output(self, band: int = 0) -> Latents:
        """The band's. All that is summed up has come by then: a band makes one call after the other."""
        weights = [weight for weight, _ in self.terms]
        return tuple(_sum(weights, values) for values in zip(*(call.outputs[band] for _, call in self.terms), strict=True))


def _sum(weights: list[float], values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = values[0] * weights[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total.add(value, alpha=weight)
    return total


class _History:
    """The computed calls for one conditioning, oldest first, and how far off forecasts in their places would have been."""

    def __init__(self, bands: int):
        self.bands, self.count = bands, 0
        self.calls: list[Computed] = []
        self._measured = 0  # of `count`
        self._error_rate = float("inf")  # relative error of a forecast by time from the last computed call
        self._error_at_rest = float("inf")  # of one for the time of the last computed call itself

    def add_computed(self, time: float) -> Computed:
        self.count += 1
        self.calls = [*self.calls[1 - HISTORY_CALLS :], Computed(time)]
        return self.calls[-1]

    def forecast(self, time: float) -> Forecast | None:
        """None where the calls so far do not reach that far."""
        if self.count < FIRST_COMPUTED or (forecast := _forecast(self.calls, time)) is None:
            return None
        return forecast if abs(forecast.terms[-1][0]) < 1.001 else None

    def expected_error(self, time: float) -> float:
        """Of a forecast for `time`, relative to the output.

        In bands the last call is left out: some of its bands may still be under way, and what has arrived by now is a
        matter of timing. That the call before has come is certain, since ranks answer in order.
        """
        if self.forecast(time) is None:
            return float("inf")
        complete = self.count - (self.bands > 1)
        for number in range(max(self._measured, self.count - len(self.calls) + 1), complete):
            self._measure(number - self.count + len(self.calls))
        self._measured = complete
        way = abs(time - self.calls[-1].time)
        return self._error_rate * way if way else self._error_at_rest

    def _measure(self, index: int) -> None:
        call = self.calls[index]
        assert len(call.outputs) == self.bands
        if (forecast := _forecast(self.calls[:index], call.time)) is None:
            return
        wrong, size = 0.0, 0.0
        for band, outputs in call.outputs.items():
            for told, output in zip(forecast.output(band), outputs, strict=True):
                wrong += (told - output).float().square().sum().item()
                size += output.float().square().sum().item()
        error = (wrong / max(size, 1e-30)) ** 0.5
        if way := abs(call.time - self.calls[index - 1].time):
            self._error_rate = error / way
        else:
            self._error_at_rest = error


def _forecast(calls: list[Computed], time: float) -> Forecast | None:
    """The line through the last of `calls` and an earlier one; at its own time the last as it is. None without a line."""
    last = calls[-1]
    if time == last.time:
        return Forecast(((1.0, last),))
    earlier = [call for call in reversed(calls[:-1]) if call.time != last.time]
    if not earlier:
        return None
    # Times are float32: 0.0667 apart may be a little less than twice 0.0333.
    enough = (BASELINE - 1e-3) * abs(time - last.time)
    before = next((call for call in earlier if abs(call.time - last.time) > enough), earlier[-1])
    ratio = (time - last.time) / (last.time - before.time)
    return Forecast(((1 + ratio, last), (-ratio, before)))


class StepCache:
    """One sampling run's cache, of a run in `bands` bands. Not thread-safe.

    Calls are forecast while their expected errors (relative to the output) add up to less than `threshold` since the last
    computed one. The conditionings of one evaluation (the prompts, where they come one after the other) are decided on
    together; an evaluation begins where a conditioning comes again, or another time.
    """

    def __init__(self, threshold: float, bands: int = 1):
        self.threshold, self.bands = threshold, bands
        self.computed, self.forecast = 0, 0  # calls
        self._histories: dict[int, _History] = {}
        self._evaluation: tuple[float, set[int]] = (float("nan"), set())  # time, conditionings
        self._skip, self._row, self._error = False, 0, 0.0

    def call(self, conditioning: int, time: float, allowed: bool) -> Computed | Forecast:
        """To be asked once for each model call, in the run's order. A call that is not `allowed` is computed.

        Whoever computes a call puts its outputs into the answer.
        """
        at, members = self._evaluation
        if time != at or conditioning in members:
            self._decide(members or {conditioning}, time)
            self._evaluation = (time, members := set())
        members.add(conditioning)
        if conditioning not in self._histories:
            self._histories[conditioning] = _History(self.bands)
        history = self._histories[conditioning]
        if self._skip and allowed and (forecast := history.forecast(time)) is not None:
            self.forecast += 1
            return forecast
        self._skip = False
        self.computed += 1
        return history.add_computed(time)

    def _decide(self, conditionings: set[int], time: float) -> None:
        if not self._skip:
            self._row, self._error = 0, 0.0
        self._row += 1
        known = [self._histories[conditioning] for conditioning in conditionings if conditioning in self._histories]
        self._error += max((history.expected_error(time) for history in known), default=float("inf"))
        self._skip = self._row <= LONGEST_ROW and self._error < self.threshold

    @property
    def summary(self) -> str:
        return f"step cache: {self.computed} of {self.computed + self.forecast} model calls computed"
