"""Which ranks and models the registry keeps, and which it ends, without any."""

import gc
import os
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend.client import models_on_ranks, transports
from parallel_backend.client import registry as registry_module
from parallel_backend.client.memory_guard import no_room
from parallel_backend.client.models_on_ranks import MOST_MODELS
from parallel_backend.client.registry import Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.processes.pool import LinksDown, RankError
from parallel_backend.quickstart.model import mini_flux
from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import BY_GLOO, BY_NCCL, P2P_EVERYWHERE, P2P_OVER_NVLINK, WITHOUT_P2P, Transport
from testing.fake_cuda import ADA, fake_cuda
from testing.models import nobody

DEVICES = ("cpu", "cpu")
SIZE = 50
OWN = mini_flux()
FAMILY = SimpleNamespace(own=OWN)
"""Bytes of a model on each device."""


class FakePool:
    """`down`: the backend of pools whose links fail, by their transport."""

    down: dict[Transport, str] = {}  # noqa: RUF012  # replaced, never changed

    def __init__(self, devices, self_test, threads, **_settings):
        self.devices, self.error, self.closed, self.ready = devices, None, False, Future()
        self.self_test, self.threads, self.asked, self.process = self_test, threads, [], os.getpid()
        self.whole, self.segments, self.part_ranks, self.cleared = self, (), (), 0
        if backend := self.down.get(self_test.transport):
            self.ready.set_exception(LinksDown("the self-test failed", backend))
        else:
            self.ready.set_result([])

    def clear(self, why):
        self.cleared += 1

    def close(self, politely=True):
        self.closed, self.politely = True, politely

    def ask(self, question, _answer, *_of):
        self.asked.append(type(question).__name__)
        done = Future()
        done.set_result([])
        return done


class FakeModel:
    """`asked`: what it was asked to hand over. `refused`: a model that does not fit. `copied`: all of its weights are in
    host memory too."""

    def __init__(self, pool, checkpoint, _setup, _poll, _progress, make_room, *_arguments, **_named):
        if checkpoint.refused:
            raise ValueError("does not fit")
        self.pool, self.checkpoint, self.make_room = pool, checkpoint, make_room
        self.unloaded, self.asked, self.runs, self.copied = False, [], 0, False
        self.held = dict.fromkeys(pool.devices, SIZE)

    @property
    def on_ranks(self):
        return not self.unloaded and self.pool.error is None and not self.pool.whole.closed

    def unload(self):
        self.unloaded = True
        return self.pool.ask(m.Unload(), m.Unloaded)

    def bytes_on(self, device):
        return self.held.get(device, 0)

    def make_way(self, device, nbytes, working):
        self.asked.append(nbytes)
        self.working = working
        if not self.checkpoint.moves:
            return None
        freed = min(self.held[device], nbytes)
        self.held[device] -= freed
        return freed

    @property
    def is_parked(self):
        return not any(self.held.values())

    @property
    def host_lacks(self):
        return 0 if self.copied else sum(self.held.values())

    @property
    def resident(self):
        return SimpleNamespace(host_bytes=[SIZE - held for held in self.held.values()])

    def begin_timeline(self):
        self.runs += 1


class FakeCheckpoint:
    """`on_disk`: the state of every file. A file of the state "away" is not there."""

    on_disk = "old"

    def __init__(self, path):
        if self.on_disk == "away":
            raise ValueError("does not exist")
        self.path, self.file_state = path, self.on_disk
        self.moves, self.refused = "stuck" not in path.name, "large" in path.name
        self.built = FAMILY

    @property
    def has_changed(self):
        return self.on_disk not in (self.file_state, "away")

    def check_unchanged(self):
        if self.on_disk != self.file_state:
            raise ValueError(f"{self.path} has changed")


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(registry_module, "Pool", FakePool)
    registry = Registry()
    yield registry
    registry.close()


@pytest.fixture
def loaded(registry, monkeypatch):
    """`loaded(name, *devices)`: (key, the model of it), on two CPU ranks where no devices are named.

    A name with "stuck" has weights that cannot leave their device, one with "large" does not fit.
    """

    monkeypatch.setattr(registry_module, "load_model", FakeModel)
    monkeypatch.setattr(registry_module, "open_setup", lambda setup: FakeCheckpoint(setup.path))

    def load(name, *devices, make_room=no_room, owner=None):
        devices = devices or DEVICES
        key = Setup(Path(name), "fp32", devices, Degrees(pipe=len(devices)), "sdpa", own_class=OWN)
        return key, registry.model(key, nobody, make_room=make_room, owner=owner)

    return load


def test_nothing_of_models_of_failed_ranks_is_kept_beside_the_next_model(loaded):
    """Their owner, a node's model, holds weights in host memory."""

    class Owner:
        pass

    owner = Owner()
    failed = loaded("one", owner=owner)[1]
    failed.pool.error = RankError("rank 1 (cpu) was killed by signal 9")
    left = [weakref.ref(failed), weakref.ref(owner)]
    del failed, owner
    loaded("other")
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_failed_ranks_are_ended_and_not_given_out_again(registry, loaded):
    failed = loaded("one")[1].pool
    failed.error = RankError("rank 1 (cpu) was killed by signal 9")
    assert registry.present() is None and not registry.pools.working
    pool = registry.pool_for(DEVICES, nobody)
    assert failed.closed
    assert pool is not failed
    assert pool.error is None
    assert loaded("one")[1].pool is pool


@pytest.mark.parametrize(
    ("first", "then", "together"),
    [
        (("cpu", "cpu"), ("cpu",), ("cpu", "cpu")),
        (("cpu",), ("cpu", "cpu"), ("cpu", "cpu")),
        (("cuda:1", "cuda:2"), ("cuda:0", "cuda:1"), ("cuda:0", "cuda:1", "cuda:2")),
        (("cuda:1", "cuda:0"), ("cuda:1", "cuda:2"), ("cuda:1", "cuda:0", "cuda:2")),  # in each set's own order
    ],
)
def test_devices_that_overlap_have_one_pool(registry, loaded, first, then, together):
    """The pool grows once; from then on neither ranks nor models change however often the sets take turns."""
    before = loaded("first", *first)[1].pool
    _, second = loaded("then", *then)
    pool = registry.pools.working[-1]
    assert (second.pool.devices, pool.devices, before.whole.closed) == (then, together, pool is not before.whole)
    _, again = loaded("first", *first)
    for _ in range(3):
        assert loaded("then", *then)[1] is second
        assert loaded("first", *first)[1] is again
    assert again.pool.devices == first and again.pool.whole is second.pool.whole is registry.pools.working[-1] is pool
    assert registry.pool_for(None, nobody).devices == first
    assert registry.pools.serves(first) and registry.pools.serves(then) and not pool.closed
    assert registry.models.held_on(pool, first[-1]) == SIZE * (1 + (first[-1] in then))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")),  # process groups number their ranks in one order
        (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")),  # ranks that share a GPU have Gloo
        (("cpu", "cuda:0"), ("cuda:0", "cuda:1")),
    ],
)
def test_devices_that_cannot_have_one_pool_end_each_other(registry, loaded, first, then):
    pool = loaded("first", *first)[1].pool
    assert loaded("then", *then)[1].pool.devices == then == registry.pools.working[-1].devices
    assert pool.closed


def test_ranks_that_were_begun_are_those_of_the_next_use(registry, loaded):
    registry.begin(DEVICES)
    begun = registry.pools.working[-1]
    registry.begin(DEVICES)
    assert registry.pools.working[-1] is begun
    assert loaded("one")[1].pool is begun


def test_ranks_that_were_begun_and_are_not_wanted_end_without_being_asked(registry):
    """A rank that starts reads no messages: to ask it would take seconds."""
    registry.begin(DEVICES)
    begun = registry.pools.working[-1]
    begun.ready = Future()
    registry.pool_for((*DEVICES, "cpu"), nobody)
    assert begun.closed
    assert not begun.politely


def test_ranks_beside_end_where_their_devices_are_wanted_or_they_have_failed(loaded):
    _, first = loaded("one", "cuda:0", "cuda:1")
    _, second = loaded("two", "cuda:2")
    _, third = loaded("three", "cuda:1", "cuda:3")
    assert (first.pool.whole.closed, second.pool.closed) == (True, False)
    second.pool.error = RankError("rank 0 (cuda:2) was killed by signal 9")
    assert loaded("two", "cuda:2")[1].pool is not second.pool
    assert second.pool.closed
    assert not third.pool.whole.closed
    _, on_ray = loaded("four", "ray:cuda")  # nobody knows which GPU that is
    assert third.pool.whole.closed
    loaded("five", "cuda:3")
    assert on_ray.pool.closed


def test_models_stay_beside_each_other_and_only_that_of_the_key_is_unloaded(registry, loaded):
    keys, models = zip(*(loaded(name) for name in "abc"), strict=True)
    assert len({id(model.pool) for model in models}) == 1
    assert [loaded(name)[1] for name in "cab"] == [models[2], models[0], models[1]]
    registry.unload(keys[1])
    assert [model.unloaded for model in models] == [False, True, False]
    assert models[0].pool.asked == ["Unload"]  # of the model alone
    registry.begin_run()
    assert [model.runs for model in models] == [1, 0, 1]
    for key in keys:
        registry.unload(key)
    assert models[0].pool.asked == ["Unload"] * 4  # the last one was of all that is on the ranks
    others = [loaded(f"more {number}")[1] for number in range(MOST_MODELS + 1)]
    assert [model.unloaded for model in others] == [True, *[False] * MOST_MODELS]


def test_a_model_that_is_refused_costs_the_others_nothing(loaded):
    model = loaded("a")[1]
    with pytest.raises(ValueError, match="does not fit"):
        loaded("large")
    assert loaded("a")[1] is model


@pytest.mark.parametrize("on_disk", ["new", "away"])
def test_a_file_that_changes_is_read_again_unless_its_user_has_the_old_one(registry, loaded, monkeypatch, on_disk):
    """A prompt computes with one model, in all its runs. A file that is away is missed only if its data is needed."""
    key, model = loaded("a")
    opened = model.checkpoint
    monkeypatch.setattr(FakeCheckpoint, "on_disk", on_disk)
    assert registry.model(key, nobody, opened=opened) is model
    again = loaded("a")[1]
    assert (again is model, model.unloaded) == ((True, False) if on_disk == "away" else (False, True))
    assert loaded("a")[1] is again


@pytest.mark.parametrize("on_disk", ["new", "away"])
def test_a_model_read_again_in_a_prompt_is_that_of_its_beginning(registry, loaded, monkeypatch, on_disk):
    """Another model took its memory, or its ranks were killed: with the new file a run would be of two models."""
    key, model = loaded("a")
    opened = model.checkpoint
    monkeypatch.setattr(FakeCheckpoint, "on_disk", on_disk)
    registry.unload(key)
    with pytest.raises(ValueError, match="a has changed"):
        registry.model(key, nobody, opened=opened)
    assert not model.pool.closed
    monkeypatch.setattr(FakeCheckpoint, "on_disk", "old")
    assert registry.model(key, nobody, opened=opened).checkpoint is opened


def test_the_least_recently_used_model_makes_room_first_and_no_more_than_is_asked(loaded, monkeypatch):
    monkeypatch.setattr(models_on_ranks, "room_for_weights", lambda device: SIZE)  # the machine may have less
    freed = []
    loaded("a"), loaded("b"), loaded("a")
    third = loaded("c", make_room=lambda *_: freed.append(1) or 7)[1]
    assert third.make_room("cpu", 60) == 60
    assert (loaded("b")[1].asked, loaded("a")[1].asked) == ([60], [60 - SIZE])
    assert not freed  # whoever has models on GPUs has none there
    on_gpu = loaded("d", "cuda:0", make_room=lambda *_: 7)[1]
    loaded("e", "cuda:0")
    assert on_gpu.make_room("cuda:0", 20) == 20
    assert loaded("e", "cuda:0")[1].asked == [13]


def test_a_model_whose_weights_cannot_leave_is_unloaded(loaded):
    stuck, other = loaded("stuck")[1], loaded("b")[1]
    assert other.make_room("cpu", 10) == SIZE
    assert stuck.unloaded


@pytest.mark.parametrize(("free", "left"), [(SIZE, ["a", "b"]), (SIZE - 1, ["b"]), (0, ["b"]), (-1, [])])
def test_where_the_host_has_no_room_the_model_that_was_parked_first_is_unloaded(registry, loaded, monkeypatch, free, left):
    """The third model has the room of the second, whose weights go to host memory, where those of the first are."""
    models = {name: loaded(name)[1] for name in "ab"}
    last = loaded("c")[1]
    assert last.make_room("cpu", SIZE) == SIZE
    monkeypatch.setattr(models_on_ranks, "room_for_weights", lambda device: free)
    assert last.make_room("cpu", SIZE) == SIZE
    assert [name for name, model in models.items() if not model.unloaded] == left


def test_models_that_take_turns_in_a_run_take_from_each_other_once(registry, loaded):
    for name in ("a", "b", "idle"):
        loaded(name)
    registry.begin_run()
    first, second = loaded("a")[1], loaded("b")[1]
    idle = loaded("idle")[1]
    registry.begin_run()
    loaded("a"), loaded("b")
    assert second.make_room("cpu", 110) == 100  # at its first use
    assert (first.working, idle.working) == (True, False)  # the one is called again in this run
    loaded("a")
    idle.held["cpu"] = 5
    assert first.make_room("cpu", 10) == 5
    assert (second.asked, idle.asked) == ([], [110, 10])
    registry.begin_run()
    loaded("a")
    assert first.make_room("cpu", 10) == 10
    assert second.asked == [10]


def test_further_uses_of_the_newest_model_are_uses_in_its_run(registry, loaded):
    other = loaded("a")[1]
    newest = loaded("b")[1]
    registry.begin_run()
    loaded("a"), loaded("b")
    assert not registry.models.use_again(other)
    assert registry.models.use_again(newest)
    assert newest.make_room("cpu", 10) == 0  # the other one keeps what it has in this run
    registry.begin_run()
    assert registry.models.use_again(newest)
    assert newest.make_room("cpu", 10) == 10
    newest.unloaded = True
    assert not registry.models.use_again(newest)


def test_ranks_talk_through_gloo_where_nccl_fails_in_every_way(starts, monkeypatch):
    monkeypatch.setattr(FakePool, "down", dict.fromkeys((BY_NCCL, P2P_OVER_NVLINK, WITHOUT_P2P), "nccl"))
    assert [starts(), starts()] == [(BY_GLOO, 4), (BY_GLOO, 1)]
    monkeypatch.setattr(FakePool, "down", {BY_GLOO: "gloo"})
    with pytest.raises(LinksDown):
        starts()
    assert starts() == (BY_NCCL, 1)


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """`starts()`: how the next ComfyUI's ranks on two fake cards talk at last, and after how many starts of ranks. It keeps
    what it has found out in `tmp_path`."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(FakePool, "down", {BY_NCCL: "nccl"})
    made = []

    def pool(*arguments, **named):
        made.append(FakePool(*arguments, **named))
        return made[-1]

    def start(devices=("cuda:0", "cuda:1")) -> tuple[Transport, int]:
        made.clear()
        one = Registry()
        one.folder = lambda: tmp_path / "parallel_dit"
        try:
            return one.pool_for(devices, nobody).self_test.transport, len(made)
        finally:
            one.close()

    monkeypatch.setattr(registry_module, "Pool", pool)
    with fake_cuda(ADA, ADA, ADA):
        yield start


def test_that_p2p_fails_is_known_at_the_next_start_of_comfyui(starts, tmp_path):
    assert starts() == (P2P_OVER_NVLINK, 2)
    assert starts() == (P2P_OVER_NVLINK, 1)
    assert starts(("cuda:1", "cuda:0")) == (P2P_OVER_NVLINK, 1)  # the same cards
    assert starts(("cuda:0", "cuda:2")) == (P2P_OVER_NVLINK, 2)  # others
    assert starts() == starts(("cuda:2", "cuda:0")) == (P2P_OVER_NVLINK, 1)
    assert starts(("cpu", "cpu")) == (P2P_OVER_NVLINK, 2)  # nothing is kept of what has no cards
    assert [path.name[:10] for path in (tmp_path / "parallel_dit").iterdir()] == ["transport-", "transport-"]


MACHINE = "/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/proc/cmdline"
"""Drivers, and the kernel's options, which the IOMMU is one of."""


@pytest.mark.parametrize("tried", [1, 2, 3])
@pytest.mark.parametrize("changed", [*MACHINE, "torch", "NCCL", "kernel", "IOMMU", "card"])
def test_p2p_is_tried_again_after_a_change(starts, monkeypatch, tmp_path, changed, tried):
    assert tuple(path.as_posix() for path in transports.MACHINE) == MACHINE
    files = {path: tmp_path / "machine" / path[1:] for path in MACHINE}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("580.95.05")
    units = tmp_path / "iommu"
    (units / "dmar0").mkdir(parents=True)
    monkeypatch.setattr(transports, "MACHINE", (*files.values(), tmp_path / "no such driver"))
    monkeypatch.setattr(transports, "IOMMU", units)
    order = BY_NCCL, P2P_OVER_NVLINK, WITHOUT_P2P, BY_GLOO
    monkeypatch.setattr(FakePool, "down", dict.fromkeys(order[:tried], "nccl"))
    assert starts() == (order[tried], tried + 1)
    if changed in files:
        files[changed].write_text("590.48.01")
    elif changed == "torch":
        monkeypatch.setattr(transports.torch, "__version__", "99")
    elif changed == "NCCL":
        monkeypatch.setattr(transports, "nccl_version", lambda: "99")
    elif changed == "kernel":
        monkeypatch.setattr(transports.platform, "release", lambda: "99")
    elif changed == "IOMMU":
        (units / "dmar0").rmdir()
    else:
        properties = transports.torch.cuda.get_device_properties
        other = lambda name: SimpleNamespace(uuid=f"{properties(name).uuid}-other", name="")  # noqa: E731
        monkeypatch.setattr(transports.torch.cuda, "get_device_properties", other)
    assert [starts(), starts()] == [(order[tried], tried + 1), (order[tried], 1)]


def test_links_that_fail_in_the_stored_way_too_are_tried_anew_at_the_next_start(starts, monkeypatch):
    """Whatever it was has changed: the verdict may be wrong by now. Until then Gloo serves."""
    starts()
    monkeypatch.setattr(FakePool, "down", dict.fromkeys((P2P_OVER_NVLINK, WITHOUT_P2P), "nccl"))
    assert [starts(), starts()] == [(BY_GLOO, 3), (BY_NCCL, 1)]


def test_a_setting_that_was_measured_to_be_faster_gives_way_if_it_fails(starts, monkeypatch, tmp_path):
    monkeypatch.setattr(FakePool, "down", {})
    transports.KeptTransports(lambda: tmp_path / "parallel_dit").keep(("cuda:0", "cuda:1"), P2P_EVERYWHERE)
    assert starts() == (P2P_EVERYWHERE, 1)
    monkeypatch.setattr(FakePool, "down", {P2P_EVERYWHERE: "nccl"})
    assert [starts(), starts()] == [(P2P_OVER_NVLINK, 2), (BY_NCCL, 1)]


def test_a_user_who_has_switched_p2p_off_gets_gloo(starts, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert starts() == (BY_GLOO, 2)


@pytest.mark.parametrize(
    "down",
    [{BY_NCCL: "gloo"}, dict.fromkeys((BY_NCCL, P2P_OVER_NVLINK, WITHOUT_P2P), "nccl") | {BY_GLOO: "gloo"}],
    ids=["not NCCL", "all"],
)
def test_links_that_fail_whatever_is_tried_are_an_error_and_the_next_prompt_begins_anew(registry, monkeypatch, down):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(FakePool, "down", down)
    with pytest.raises(LinksDown, match="the self-test failed"):
        registry.pool_for(DEVICES, nobody)
    registry.pools._pools[-1].error = LinksDown("the self-test failed")  # as a pool has it
    monkeypatch.setattr(FakePool, "down", {})
    assert registry.pool_for(DEVICES, nobody).self_test.transport == BY_NCCL


def test_ranks_that_were_begun_and_have_died_are_started_anew(registry, loaded):
    """As while the prompt's text is encoded: the prompt has lost nothing."""
    registry.begin(DEVICES)
    begun = registry.pools.working[-1]
    begun.error = RankError("rank 1 (cpu) was killed by signal 9")
    begun.ready = Future()
    begun.ready.set_exception(begun.error)
    model = loaded("a")[1]
    assert model.pool is not begun
    assert begun.closed


def test_room_for_a_model_that_loads_may_be_that_of_another_one(registry, monkeypatch):
    """ComfyUI then unloads a MODEL that the ranks had before, on the thread that loads."""
    keys = [Setup(Path(name), "fp32", DEVICES, Degrees(pipe=2), "sdpa", own_class=OWN) for name in ("before", "now")]

    class Loading:
        def __init__(self, pool, _checkpoint, _setup, _poll, _progress, make_room, *_arguments, **_named):
            self.pool = pool
            self.freed, self.on_ranks = make_room("cuda:0", 1), True

    def make_room(device: str, missing: int) -> int:
        registry.unload(keys[0])
        return 7 + registry.models.give_back(keys[0], device, 1)

    monkeypatch.setattr(registry_module, "load_model", Loading)
    monkeypatch.setattr(registry_module, "open_setup", lambda setup: FakeCheckpoint(setup.path))
    found = []
    load = threading.Thread(target=lambda: found.append(registry.model(keys[1], nobody, make_room=make_room)), daemon=True)
    load.start()
    load.join(30)
    assert [model.freed for model in found] == [7]


def test_exit_does_not_wait_for_a_load(registry):
    loading, over = threading.Event(), threading.Event()

    def load(pool):
        loading.set()
        over.wait(30)

    def model():
        with registry._lock:
            registry.pools.use(DEVICES, load)

    thread = threading.Thread(target=model)
    thread.start()
    assert loading.wait(30)
    (pool,) = registry.pools.working
    registry.exit()
    assert (pool.closed, pool.politely) == (True, False)
    over.set()
    thread.join()
    with pytest.raises(RankError, match="starts no more ranks"):
        registry.pool_for((*DEVICES, "cpu"), lambda: None)


def test_borrowed_ranks_lose_their_models_and_end_with_a_failure(registry):
    with registry.borrow(DEVICES) as pool:
        assert pool.cleared == 1
    assert pool.cleared == 2  # of what the borrower has left
    with pytest.raises(KeyboardInterrupt), registry.borrow(DEVICES) as again:
        assert again is pool
        raise KeyboardInterrupt
    assert pool.closed
