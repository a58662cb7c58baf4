"""Finds the micro-steps that need not compute their text, because the rank has its keys and values (OwnLatent.steady)."""

from collections.abc import Callable
from dataclasses import replace

from parallel_backend.wire.sampling import Step


class WordsOnce:
    """Steady text is computed once in a run, with the first call of each batch entry. All ranks get the same messages in the
    same order, so each decides alike, before it knows what it will receive."""

    def __init__(self) -> None:
        self._have: dict[tuple[int, int], set[int]] = {}  # by run and conditioning, batch entries whose words have run
        self._decided: dict[int, Step] = {}  # by `seq`, the newest two: one is looked at before it is computed

    def of(self, step: Step) -> Step:
        """Return the micro-step, without its text if that was computed before. Residuals of a ControlNet may change the
        text. The text's keys and values then are valid only for this call, and overwrite those in its run's K/V buffer."""
        if not step.with_text:
            return step
        if step.seq in self._decided:
            return self._decided[step.seq]
        key = step.run, step.conditioning
        have, entries = self._have.setdefault(key, set()), set(range(step.entries.start, step.entries.stop))
        decided = replace(step, with_text=False) if entries <= have and not step.residuals else step
        if not step.residuals:
            have |= entries
        elif step.run:
            have -= entries
        self._decided = dict([*list(self._decided.items())[-1:], (step.seq, decided)])
        return decided

    def close_run(self, run: int) -> None:
        """Forget which texts were computed in this run and outside of runs: their keys and values are dropped."""
        self._drop(lambda key: key[0] in (0, run))

    def drop_conditioning(self, conditioning: int) -> None:
        self._drop(lambda key: key[1] == conditioning)

    def forget(self) -> None:
        """Compute all text again, because weights have changed."""
        self._drop(lambda _key: True)

    def _drop(self, which: Callable[[tuple[int, int]], bool]) -> None:
        self._decided.clear()  # a micro-step that has been looked at comes before any other message
        self._have = {key: have for key, have in self._have.items() if not which(key)}
