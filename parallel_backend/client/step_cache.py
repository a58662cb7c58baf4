"""A step cache: model calls whose output can be extrapolated from earlier calls are forecast instead of computed.

The client decides before anything is sent, so a forecast call costs the ranks nothing, and all modes and models can use it.
A forecast is the line through two computed outputs of the conditioning, taken at the new call's timestep (TaylorSeer's first
order, arXiv 2503.06923, on the model's output). TeaCache (2411.19108) and EasyCache (2507.02860) reuse the last output. With
17 of 30 calls computed, the line gives images 53.4 dB from those of all 30 calls, reuse 43.6 dB.
"""

from dataclasses import dataclass, field

import torch

from parallel_backend.own_class.calls.patching import Latents

FIRST_COMPUTED = 3
"""First calls of a conditioning, which are always computed: two make a line, and the third shows its error."""
LONGEST_ROW = 3
"""Maximum number of consecutive forecast calls."""
BASELINE = 2.0
"""The two calls of a line are at least this many times as far apart as the line is extended, if there are such calls: a
shorter line follows the noise of its outputs. A line is never extended further than its calls are apart."""
HISTORY_CALLS = 6
"""Number of a conditioning's computed calls whose outputs are kept."""


@dataclass(frozen=True)
class Computed:
    """A computed call. `time`: its timestep. `outputs`: by band, added as they arrive."""

    time: float
    outputs: dict[int, Latents] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """A forecast call. `terms`: (weight, computed call); the weighted sum of their outputs is the output."""

    terms: tuple[tuple[float, Computed], ...]

    def output(self, band: int = 0) -> Latents:
        """The band's output. The outputs in the sum are complete, because a band makes its calls one after the other."""
        weights = [weight for weight, _ in self.terms]
        return tuple(_sum(weights, values) for values in zip(*(call.outputs[band] for _, call in self.terms), strict=True))


def _sum(weights: list[float], values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = values[0] * weights[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total.add(value, alpha=weight)
    return total


class _History:
    """The computed calls of one conditioning, oldest first, and the errors that forecasts in their place would have had."""

    def __init__(self, bands: int):
        self.bands, self.count = bands, 0
        self.calls: list[Computed] = []
        self._measured = 0  # calls of `count` at which the error was measured
        self._error_rate = float("inf")  # relative error of a forecast, per time since the last computed call
        self._error_at_rest = float("inf")  # relative error of a forecast for the time of the last computed call

    def add_computed(self, time: float) -> Computed:
        self.count += 1
        self.calls = [*self.calls[1 - HISTORY_CALLS :], Computed(time)]
        return self.calls[-1]

    def forecast(self, time: float) -> Forecast | None:
        """Return a forecast for timestep `time`. None: there are too few calls, or they are too close together to
        extrapolate that far."""
        if self.count < FIRST_COMPUTED or (forecast := _forecast(self.calls, time)) is None:
            return None
        return forecast if abs(forecast.terms[-1][0]) < 1.001 else None

    def expected_error(self, time: float) -> float:
        """Return the expected error of a forecast for timestep `time`, relative to the output.

        With several bands the last call is not measured: which of its bands have arrived depends on timing, and results must
        repeat. The call before it has arrived in all bands, because ranks answer in order.
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
    """Return the line through the last of `calls` and an earlier one, at timestep `time`. None: all calls are at one other
    timestep."""
    last = calls[-1]
    if time == last.time:
        return Forecast(((1.0, last),))
    earlier = [call for call in reversed(calls[:-1]) if call.time != last.time]
    if not earlier:
        return None
    # Less a tolerance: times are float32, so that 0.0667 may be a little less than twice 0.0333.
    enough = (BASELINE - 1e-3) * abs(time - last.time)
    before = next((call for call in earlier if abs(call.time - last.time) > enough), earlier[-1])
    ratio = (time - last.time) / (last.time - before.time)
    return Forecast(((1 + ratio, last), (-ratio, before)))


class StepCache:
    """The cache of one sampling run in `bands` bands. Not thread-safe.

    A call is forecast if the expected relative errors of all forecasts since the last computed call add up to less than
    `threshold`. One decision is made for all conditionings of an evaluation, which are called one after the other. A new
    evaluation begins with another timestep, or with a conditioning that the present evaluation already has.
    """

    def __init__(self, threshold: float, bands: int = 1):
        self.threshold, self.bands = threshold, bands
        self.computed, self.forecast = 0, 0  # calls
        self._histories: dict[int, _History] = {}
        self._evaluation: tuple[float, set[int]] = (float("nan"), set())  # time, conditionings
        self._skip, self._row, self._error = False, 0, 0.0

    def call(self, conditioning: int, time: float, allowed: bool) -> Computed | Forecast:
        """Decide on the next model call of the run. A call that is not `allowed` is computed. The caller must put the
        outputs of a computed call into the returned record."""
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
