"""The state machine: its rules, and what is looked at after each."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.processes.pool import Pool, RankError
from parallel_backend.processes.watchdog import SILENCE_SECONDS
from testing.emulated_device import EmulatedDevice
from testing.models import Cancelled, nobody
from testing.thread_ranks import thread_ranks

from . import ledger
from .alone import Alone, Tensors, banded, exact, in_run
from .subjects import ADDITIONS, NOTHING, TIMES, Added, Given, Subject, make_subjects

DEVICES = ("cpu:0", "cpu:1")
ROOMS = {"for all": 64 << 20, "for two": 17 << 20, "for one": 12 << 20, "for a part": 7 << 20}
"""Bytes of each device. Without room for all a call may be refused, if models are in use that give up no more. With room for
a part the mini models stream blocks."""
RATE = 1e10


@dataclass
class World:
    """What the examples share. `start_of(room)`: see Registry.start_of. `happened`: how often what has happened."""

    subjects: tuple[Subject, ...]
    alone: Alone
    start_of: Callable[[int], Callable[..., Any]]
    devices: tuple[str, ...] = DEVICES
    happened: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def make_world(folder: Path) -> Iterator[World]:
    with thread_ranks() as start:
        pool = Pool(("cpu",) * 2, start=start, silence=10 * SILENCE_SECONDS)
        pool.ready.result(timeout=60)

        def start_of(room: int):
            return lambda devices: lambda settings: start(settings, device=EmulatedDevice(room, RATE))

        try:
            yield World(make_subjects(folder), Alone(pool), start_of)
        finally:
            pool.close()


@dataclass
class Opened:
    """A run of a model that is under way. `done`: number of its calls so far."""

    model: RemoteTransformer
    run: int
    given: Given
    done: int = 0


Rule = Callable[..., None]
Look = tuple[int, Given] | None


def refusable(body: Rule) -> Rule:
    """The body of a rule, which ends early where a call is refused for its memory. That has to cost nothing else."""

    @functools.wraps(body)
    def refused(self: "States", **drawn: Any) -> None:
        self.world.happened["rules"] += 1
        try:
            body(self, **drawn)
        except ValueError as error:
            if self.room == "for all" or not str(error).startswith(("latent_image: ", "model_name: ")):
                raise
            self.world.happened["refused"] += 1

    return refused


GIVEN = st.sampled_from([Given(prompt, skips) for prompt in (0, 1) for skips in (False, True)])
ADDED, TIME = st.sampled_from(ADDITIONS), st.sampled_from(TIMES)
CHANGE = st.one_of(st.none(), ADDED)
SHARES = st.sampled_from((0.1, 0.5, 1.0, 1000.0))
WHICH = st.integers(0, 1)
LOOK = st.one_of(st.none(), st.tuples(WHICH, GIVEN))
"""A call of a model, behind the rule: which model, and with what."""
LAST = Given(skips=True)


class States(RuleBasedStateMachine):
    def __init__(self, world: World):
        super().__init__()
        self.world = world
        self.registry = Registry()
        self.added: dict[Subject, Added] = dict.fromkeys(world.subjects, NOTHING)
        self.opened: dict[Subject, Opened] = {}
        self.sound = False

    @initialize(room=st.sampled_from(("for all", "for a part", "for two", "for a part", "for one")))
    def begin(self, room: str) -> None:
        self.world.happened.update(["examples", f"room {room}"])
        self.room = room
        self.registry.start_of = self.world.start_of(ROOMS[room])

    def model(self, subject: Subject) -> RemoteTransformer:
        """As a node asks for it: loaded, with what is to be added to it."""
        model = self.registry.model(subject.setup(self.world.devices), nobody)
        added = self.added[subject]
        model.adapt(added.name, subject.deltas(added), nobody, added.strengths)
        return model

    def look(self, look: Look) -> None:
        if look is not None:
            self.same_as_alone(self.world.subjects[look[0]], look[1], TIMES[0])

    def same_as_alone(self, subject: Subject, given: Given, time: float) -> None:
        model = self.model(subject)
        same(exact(model, subject, given, time), self.world.alone.exact(subject, self.added[subject], given, time))
        if self.room == "for all" and not self.opened:
            held = zip(model.resident.expected(), model.resident.weights, strict=True)
            assert all(each == weights.total for each, weights in held), "weights that have room did not come back"

    @rule(which=WHICH, given=GIVEN, calls=st.lists(st.tuples(CHANGE, TIME), min_size=1, max_size=4), begins=st.booleans())
    @refusable
    def run(self, which: int, given: Given, calls: list[tuple[Added | None, float]], begins: bool) -> None:
        """A sampling run of exact calls, or more calls of the last one. Before a call the LoRA or the merge may change."""
        if begins:
            self.registry.begin_run()
        subject = self.world.subjects[which]
        for change, time in calls:
            if change is not None and subject not in self.opened:
                self.added[subject] = change
            self.same_as_alone(subject, given, time)

    @rule(which=WHICH, given=GIVEN)
    @refusable
    def run_in_bands(self, which: int, given: Given) -> None:
        subject = self.world.subjects[which]
        given = Given(given.prompt)
        self.registry.begin_run()
        found = banded(self.model(subject), subject, given)
        same(found, self.world.alone.banded(subject, self.added[subject], given))

    @rule(which=WHICH, given=GIVEN, last=st.integers(0, 5), look=LOOK)
    @refusable
    def cancel(self, which: int, given: Given, last: int, look: Look) -> None:
        """A run in bands that is given up when it posts its call of that number."""
        subject = self.world.subjects[which]
        self.registry.begin_run()
        model, left = self.model(subject), iter(range(last))
        post = model.post

        def cancelled(call: Any) -> None:
            if next(left, None) is None:
                raise Cancelled
            post(call)

        with mock.patch.object(model, "post", cancelled), contextlib.suppress(Cancelled):
            banded(model, subject, given)
        self.look(look)

    @rule(which=WHICH, added=ADDED, look=LOOK)
    @refusable
    def add(self, which: int, added: Added, look: Look) -> None:
        """Merge, put a LoRA on, take it off, or change its strength: at the model's next use."""
        if (subject := self.world.subjects[which]) not in self.opened:
            self.added[subject] = added
        self.look(look)

    @rule(which=WHICH, look=LOOK)
    @refusable
    def many_prompts(self, which: int, look: Look) -> None:
        """More than the ranks keep."""
        if (subject := self.world.subjects[which]) not in self.opened:
            for prompt in range(10, 19):
                exact(self.model(subject), subject, Given(prompt), TIMES[0])
        self.look(look)

    @rule(which=WHICH, rank=st.integers(0, 1), share=SHARES, look=LOOK)
    @refusable
    def give_way(self, which: int, rank: int, share: float, look: Look) -> None:
        """For another program: so much of what the model has on a device."""
        setup, device = self.world.subjects[which].setup(self.world.devices), self.world.devices[rank]
        held = self.registry.models.bytes_on(setup, device)
        freed = self.registry.models.give_back(setup, device, held * share)
        assert freed == held - self.registry.models.bytes_on(setup, device)
        self.look(look)

    @rule(which=WHICH, given=GIVEN)
    @refusable
    def open_run(self, which: int, given: Given) -> None:
        """Opens a run, whose calls come one by one."""
        if (subject := self.world.subjects[which]) in self.opened:
            return
        self.registry.begin_run()
        model = self.model(subject)
        self.opened[subject] = opened = Opened(model, model.open_run(), given)
        model.watch_memory(opened.run, 2, True, nobody)

    @rule(number=st.integers(0, 2), calls=st.integers(1, 2))
    @refusable
    def go_on(self, number: int, calls: int) -> None:
        """Further calls of a run that is open."""
        if not self.opened:  # no precondition: what is drawn does not depend on what ranks have done
            return
        subject, opened = [*self.opened.items()][number % len(self.opened)]
        assert self.model(subject) is opened.model
        for _ in range(min(calls, len(TIMES) - opened.done)):
            try:
                found = in_run(opened.model, subject, opened.given, opened.run, opened.done)
            except ValueError:  # its first band has been computed
                opened.model.discard_run(self.opened.pop(subject).run)
                raise
            same(found, self.world.alone.in_run(subject, self.added[subject], opened.given, opened.done))
            opened.done += 1

    @rule(number=st.integers(0, 2), discards=st.booleans(), look=LOOK)
    @refusable
    def close_run(self, number: int, discards: bool, look: Look) -> None:
        if not self.opened:
            return
        opened = self.opened.pop([*self.opened][number % len(self.opened)])
        if discards:
            opened.model.discard_run(opened.run)
        else:
            opened.model.close_run(opened.run, nobody)
        self.look(look)

    @rule(which=WHICH, given=GIVEN, rank=st.integers(0, 1), messages=st.integers(0, 12), look=LOOK)
    @refusable
    def kill(self, which: int, given: Given, rank: int, messages: int, look: Look) -> None:
        """A rank dies without a word at a message while the model is loaded, adapted or called."""
        subject = self.world.subjects[which]
        pool, model, left = next(reversed(self.registry.pools.working), None), None, iter(range(messages))
        if pool is None:
            return
        worker = pool.ranks.workers[rank]
        handle = worker._handle

        def die(message: Any) -> None:
            if next(left, None) is None:
                pool.ranks.die(rank)
            handle(message)

        with mock.patch.object(worker, "_handle", die):
            try:
                while True:
                    model = self.model(subject)
                    exact(model, subject, given, TIMES[0])
            except RankError as error:
                assert f"rank {rank} " in str(error)
        self.opened.clear()
        assert not self.registry.models.held_on(pool, self.world.devices[rank])
        assert self.registry.models.bytes_on(subject.setup(self.world.devices), self.world.devices[rank]) == 0
        self.look(look)

    @rule(which=WHICH, everything=st.booleans(), look=LOOK)
    @refusable
    def unload(self, which: int, everything: bool, look: Look) -> None:
        if everything:
            self.registry.unload()
            self.opened.clear()
        else:
            self.registry.unload(self.world.subjects[which].setup(self.world.devices))
            self.opened.pop(self.world.subjects[which], None)
        self.look(look)

    @invariant()
    def it_adds_up(self) -> None:
        self.sound = False
        ledger.check(self.registry, {id(each.model): {each.run} for each in self.opened.values()})
        self.sound = True

    def teardown(self) -> None:
        """Every model is still as alone, and leaves nothing behind."""
        try:
            if self.sound:
                for opened in self.opened.values():
                    opened.model.discard_run(opened.run)
                for subject in self.world.subjects:
                    self.registry.begin_run()
                    self.same_as_alone(subject, LAST, TIMES[0])
                self.registry.unload()
                ledger.check(self.registry, {})
        finally:
            self.registry.close()


def same(found: Tensors, expected: Tensors) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), f"differs from a model alone by {((one - other).norm() / other.norm()).item():.2e}"
