"""Which micro-steps leave their text out, since the rank has kept its keys and values."""

from collections.abc import Callable
from dataclasses import replace

from parallel_backend.core.spans import Span
from parallel_backend.families import Family
from parallel_backend.families.base.blocks import CAUSAL_TEXT
from parallel_backend.wire.sampling import Step


class KeptTexts:
    """A text that sees no image and is modulated for time 0 runs once in a run, with the first call of each batch entry.

    All ranks get the same messages in the same order, so each decides alike, before it posts the micro-step's receive.
    """

    def __init__(self, family: Family):
        lists = family.blocks.lists
        self._keeps = any(CAUSAL_TEXT in spec.attention.values() for spec in lists)
        self._have: dict[tuple[int, int], set[int]] = {}  # by run and conditioning, batch entries whose text has run
        # The newest two, by number and conditioning: a micro-step is looked at before it is computed.
        self._decided: dict[tuple[int, int], Step] = {}

    def of(self, step: Step) -> Step:
        """The micro-step, without its text if that has run. A controlled text is another one in every call."""
        if not self._keeps or not step.with_text or step.controlled:
            return step
        key = step.seq, step.conditioning
        if key not in self._decided:
            have = self._have.setdefault((step.run, step.conditioning), set())
            entries = set(_numbers(step.entries))
            decided = replace(step, with_text=False) if entries <= have else step
            have |= entries
            newest = list(self._decided.items())[-1:]
            self._decided = dict([*newest, (key, decided)])
        return self._decided[key]

    def close_run(self, run: int) -> None:
        """The run's buffers are dropped, and with them what calls outside of runs have kept."""
        self._drop(lambda key: key[0] in (0, run))

    def drop_conditioning(self, conditioning: int) -> None:
        self._drop(lambda key: key[1] == conditioning)

    def forget(self) -> None:
        """Every text runs again: weights have changed."""
        self._drop(lambda _key: True)

    def _drop(self, which: Callable[[tuple[int, int]], bool]) -> None:
        self._decided.clear()  # a micro-step that has been looked at comes before any other message
        self._have = {key: have for key, have in self._have.items() if not which(key)}


def _numbers(entries: Span) -> range:
    return range(entries.start, entries.stop)
