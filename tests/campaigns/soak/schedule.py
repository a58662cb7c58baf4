"""In which order requests are sent, what is queued behind what, and which are cancelled when: drawn at random."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .requests import Request

CANCELLED = 0.15
"""Share of prompts that are cancelled."""
RESTARTS = 0.12
"""Share of prompts at the end, among which setups on other devices are, and prompts are cancelled while ranks load."""
LATEST = 1.2
"""Of the seconds that the request takes alone: when it is cancelled at the latest, so that some come too late."""
INTERRUPT, EVERYTHING = "interrupt", "interrupt whatever runs"
UNLOAD, FREE, BOTH, NOTHING = "unload node", "free button", "free button and unload node", ""
RESTS = {NOTHING: 60, UNLOAD: 12, FREE: 13, BOTH: 15}
"""How often what is done at a change of setups."""


@dataclass(frozen=True)
class Turn:
    """One prompt. `cancel`: '' or how; `moment`: when, in units of the seconds that the request takes alone."""

    request: Request
    cancel: str = ""
    moment: float = 0.0
    trace: bool = False


@dataclass(frozen=True)
class Batch:
    """Prompts that are queued at once, and what is done when all have ended."""

    turns: tuple[Turn, ...]
    after: str = NOTHING


@dataclass(frozen=True)
class Plan:
    """`window`: prompts in a round of all requests on two ranks; `lived`: prompts in all rounds."""

    batches: tuple[Batch, ...]
    window: int
    lived: int

    @property
    def requests(self) -> tuple[Request, ...]:
        """Each that is sent, once, those of a setup together."""
        found = {turn.request: None for batch in self.batches for turn in batch.turns}
        return tuple(sorted(found, key=lambda request: request.name))


def make_plan(two_ranks: list[Request], others: list[Request], prompts: int, seed: int) -> Plan:
    """`prompts` prompts. Rounds, each of all requests on two ranks in another order; then others among them.

    A round has a run of prompts for each setup, and ends with nothing loaded. In rounds no prompt is cancelled that has the
    ranks load: that ends them, and they are to live on. The first round has Parallel Trace too.
    """
    chance = random.Random(seed)
    extra = round(len(two_ranks) * CANCELLED / (1 - CANCELLED))
    window = len(two_ranks) + extra
    rounds = max(1, int(prompts * (1 - RESTARTS)) // window)
    batches: list[Batch] = []
    for index in range(rounds):
        cancelled = chance.choices(two_ranks, k=extra)
        runs = _by_setup(two_ranks)
        for setup in chance.sample(list(runs), len(runs)):
            first, *more = chance.sample(runs[setup], len(runs[setup]))
            turns = [Turn(request) for request in more]
            turns += [_cancelled(request, chance) for request in cancelled if request.setup.name == setup]
            chance.shuffle(turns)
            traced = Turn(first, trace=index == 0 and first.setup.ranks > 0)
            batches += _batches([traced, *turns], chance)
        batches.append(Batch((), BOTH))
    lived = sum(len(batch.turns) for batch in batches)
    batches += _restarts(two_ranks, others, prompts - lived, chance)
    return Plan(tuple(batches), window, lived)


def _restarts(two_ranks: list[Request], others: list[Request], prompts: int, chance: random.Random) -> Iterator[Batch]:
    """Short runs; every second one on other devices."""
    other, two = ([*_by_setup(requests).values()] for requests in (others, two_ranks))
    index = 0
    while prompts > 0:
        requests = chance.choice(two) if index % 2 else other[index // 2 % len(other)]
        chosen = chance.choices(requests, k=min(prompts, chance.randint(2, 4)))
        turns = [_cancelled(each, chance) if chance.random() < 2 * CANCELLED else Turn(each) for each in chosen]
        prompts -= len(turns)
        index += 1
        yield from _batches(turns, chance)


def _by_setup(requests: list[Request]) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(request.setup.name, []).append(request)
    return found


def _cancelled(request: Request, chance: random.Random) -> Turn:
    return Turn(request, INTERRUPT, chance.uniform(0, LATEST))


def _batches(turns: list[Turn], chance: random.Random) -> Iterator[Batch]:
    """One run: one to four prompts at once, and at its end a rest."""
    while turns:
        count = chance.choices((1, 2, 3, 4), (6, 2, 1, 1))[0]
        taken, turns = turns[:count], turns[count:]
        after = NOTHING if turns else chance.choices(list(RESTS), RESTS.values())[0]
        if count == 1 and taken[0].cancel and chance.random() < 0.5:
            taken = [replace(taken[0], cancel=EVERYTHING)]  # nothing else is queued
        yield Batch(tuple(taken), after)
