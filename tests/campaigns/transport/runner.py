"""One case under one seed on the strict transport, against the same case on the mailbox."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.local import Ranks
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.processes.watchdog import SILENCE_SECONDS
from parallel_backend.rank.attention import ulysses
from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import StartSettings
from testing import mini
from testing.models import on_ranks
from testing.thread_ranks import thread_ranks
from tests.support.strict.distributed import StrictDistributed
from tests.support.strict.rules import ANY, ISSUE, Rules

from .cases import CONFIG, Case, Files, nobody

RULES = {1: Rules(places=1, launch=ISSUE, trials=True), 8: Rules(places=8, launch=ANY, trials=True)}
"""By K."""

Start = Callable[[StartSettings], Ranks]


@dataclass
class Pools:
    """By number of ranks, each on a device of its own. `keep`: a model that these ranks hold is not loaded again."""

    start: Start
    keep: bool = False
    devices: Callable[[int], tuple[str, ...]] = lambda world: ("cpu",) * world
    _pools: dict[int, Pool] = field(default_factory=dict)
    _models: dict[int, tuple[tuple, RemoteTransformer]] = field(default_factory=dict)

    def __call__(self, world: int) -> Pool:
        if world not in self._pools:
            self._pools[world] = Pool(self.devices(world), start=self.start, silence=10 * SILENCE_SECONDS)
            self._pools[world].ready.result(timeout=300)
        return self._pools[world]

    def load(self, checkpoint: Checkpoint, degrees: Degrees, dtype: str = "fp32", **options: Any) -> RemoteTransformer:
        key, pool = (checkpoint.path, degrees, dtype, *options.items()), self(degrees.world)
        known, model = self._models.get(degrees.world, (None, None))
        if not self.keep or known != key:
            model = on_ranks(pool, checkpoint, degrees, dtype, "sdpa", nobody, **options)
            self._models[degrees.world] = key, model
        return model

    def unload(self) -> None:
        """What the ranks hold."""
        self._models.clear()
        for unloaded in [pool.ask(m.Unload(), m.Unloaded) for pool in self._pools.values()]:
            unloaded.result(timeout=60)

    def close(self) -> None:
        self._models.clear()
        while self._pools:
            self._pools.popitem()[1].close()


@dataclass
class Trials:
    """`most_under_way`: communicators of one rank with an operation under way at once, at most over all trials."""

    files: Files
    plain: Start
    strict: Start
    distributed: StrictDistributed
    most_under_way: int = 0
    _expected: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _mailbox: Pools = field(init=False)

    def __post_init__(self):
        self._mailbox = Pools(self.plain)

    def expected(self, case: Case) -> list[torch.Tensor]:
        """What the case is to give."""
        if case.name not in self._expected:
            self._expected[case.name] = self.on_mailbox(case)
        return self._expected[case.name]

    def on_mailbox(self, case: Case) -> list[torch.Tensor]:
        """What it gives there, run anew, on ranks that all cases share."""
        try:
            return case.run(self.files, self._mailbox.load, self._mailbox)
        except BaseException:
            self._mailbox.close()  # the next case has others
            raise

    def close(self) -> None:
        self._mailbox.close()

    def trial(self, case: Case, rules: Rules) -> str | None:
        """None where all is well; else what is wrong, in words."""
        return self.trials(case, [rules])[0]

    def trials(self, case: Case, several: list[Rules]) -> list[str | None]:
        """As many trials, one after the other on the same ranks as long as nothing is wrong."""
        expected, outcomes, pools = self.expected(case), [], Pools(self.strict, keep=not case.rare)
        for number, rules in enumerate(several):
            self.distributed.follow(rules)
            wrong = None
            try:
                found = case.run(self.files, pools.load, pools)
                if number + 1 == len(several):
                    pools.close()
                wrong = None if same(found, expected) else "the result differs"
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            wrong = self._broken() or wrong
            outcomes.append(wrong)
            if wrong is not None:
                pools.close()
                self._forget()
                pools = Pools(self.strict, keep=not case.rare)
        pools.close()
        self._forget()
        return outcomes

    def kill(self, degrees: Degrees, rules: Rules) -> str | None:
        """As `trial`: a rank ends without a word in the middle of a run, at an operation that the seed decides. The error
        names it, the others end, and the next ranks work."""
        chance = random.Random(f"kill {rules.seed}")
        victim, last = chance.randrange(degrees.world), chance.randrange(1, 60)
        self.distributed.follow(rules)
        given, pools = mini.inputs(CONFIG, height=9, width=10, text=5), Pools(self.strict)
        try:
            model = pools.load(self.files.mini(), degrees)
            fabric, left = self.distributed.fabrics[-1], iter(range(last))

            def end(rank: int, _number: int) -> None:
                if rank == victim and next(left, None) is None:
                    model.pool.ranks.die(rank)

            fabric.before_issue = end
            while True:
                model.predict(ModelCall(*given), nobody)
        except RankError as error:
            if f"rank {victim} " not in str(error):
                return f"rank {victim} died, and the error is: {error}"
        finally:
            pools.close()
            self._forget()
        again, plain = Pools(self.strict), Pools(self.plain)
        try:
            found = [ranks.load(self.files.mini(), degrees).predict(ModelCall(*given), nobody) for ranks in (again, plain)]
        finally:
            again.close()
            plain.close()
            self._forget()
        return None if torch.equal(*found) else "after a kill the result differs"

    def _broken(self) -> str | None:
        return next((str(fabric.broken) for fabric in self.distributed.fabrics if fabric.broken is not None), None)

    def _forget(self) -> None:
        """All ranks so far have ended."""
        worlds = self.distributed.fabrics
        self.most_under_way = max([self.most_under_way, *(fabric.most_under_way for fabric in worlds)])
        worlds.clear()


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def rules_of(places: int, seed: int, delay: float) -> Rules:
    return replace(RULES[places], seed=seed, delay=delay)


@contextlib.contextmanager
def trials(folder: Path) -> Iterator[Trials]:
    """Heads go in two groups under Ulysses, as on CUDA: more is under way at once."""
    distributed = StrictDistributed(RULES[8])
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(ulysses.HEAD_GROUPS, cpu=2))
        plain = stack.enter_context(thread_ranks())
        strict = stack.enter_context(thread_ranks(distributed))
        made = Trials(Files(folder), plain, strict, distributed)
        stack.callback(made.close)
        yield made
