"""Weights that come to an emulated device block by block give what weights on the device give, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.rank.host_memory import host_store, sharing
from parallel_backend.rank.stage.store import slots
from parallel_backend.wire import messages as m
from testing import mini
from testing.emulated_device import EmulatedCopies, EmulatedDevice
from testing.quantised import quantise_blocks
from tests.support.one_rank import OneRank

pytestmark = pytest.mark.threads

RATE = 1e10
"""Bytes per second."""
LARGE = 1 << 30
CONFIG = mini.CONFIG | {"double_blocks": 2, "single_blocks": 6, "context_width": 64, "pooled_width": 64}
"""Of sides that every format can hold."""
LAST = "single_blocks.5"


class Alone(OneRank):
    """`resident`: bytes of its weights; `device`: bytes of the emulated device."""

    def __init__(
        self, path: Path, resident: int | None = None, device: int = LARGE, dtype: str = "fp32", rate: float = RATE
    ):
        self.copies = EmulatedCopies(0, EmulatedDevice(device, rate))
        super().__init__(path, dtype, () if resident is None else (resident,), copies=self.copies)
        self.store = self.stage.store

    def output(self, calls: int = 1) -> torch.Tensor:
        """The last of so many exact calls."""
        x, timestep, tensors = mini.inputs(CONFIG, batch=1)
        self.put(x, tensors)
        for _ in range(calls):
            found = self.step(x, timestep)
        return found

    def streamed_bytes(self) -> int:
        return self.engine.close_run(0).streamed_bytes


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return mini.save(mini.random_model(CONFIG), tmp_path_factory.mktemp("file") / "tiny.safetensors")


@pytest.fixture(scope="module")
def whole(file) -> Alone:
    return Alone(file)


def part(whole: Alone, share: float) -> int:
    return int(share * whole.store.device_bytes)


def test_the_device_holds_what_it_is_told_to_and_no_more(file, whole):
    resident = part(whole, 0.7)
    model = Alone(file, resident, device=resident)
    assert torch.equal(model.output(calls=3), whole.output())
    assert model.copies.peak_bytes == model.store.device_bytes <= resident
    assert model.store.device_bytes + model.store.host_bytes >= whole.store.device_bytes
    assert model.streamed_bytes() >= 3 * model.store.host_bytes
    model.engine.close()
    assert model.copies.used == 0


def test_weights_give_way_and_come_back(file, whole):
    """By as many blocks as have to, and what has once been copied to the host is not copied there again."""
    model, expected = Alone(file), whole.output()
    everything, copied = model.store.device_bytes, []
    copy = model.copies.copy
    model.copies.copy = lambda destination, source: copied.append(source.nbytes) or copy(destination, source)
    for share in (0.8, 0.6, 0.9, 1.0):
        held = model.engine.set_resident(part(whole, share))
        assert held.device_bytes == model.copies.used <= part(whole, share)
        assert torch.equal(model.output(calls=2), expected)
    assert model.store.device_bytes == everything
    to_host = held.host_bytes
    assert 0 < to_host < everything
    copied.clear()
    assert model.engine.set_resident(0).device_bytes == model.copies.used == 0
    assert sum(copied) == everything - to_host
    with pytest.raises(RuntimeError, match="parked in host memory"):
        model.output()
    copied.clear()
    assert model.engine.set_resident(everything).device_bytes == sum(copied) == everything
    assert torch.equal(model.output(), expected)
    assert model.engine.set_resident(0).host_bytes == sum(copied) == everything
    model.engine.set_resident(part(whole, 0.7))
    assert torch.equal(model.output(calls=2), expected)


@pytest.mark.parametrize("shared", [True, False], ids=["shared with other ranks", "of its own"])
def test_without_host_memory_the_file_is_read_in_micro_steps_and_between_them(file, whole, monkeypatch, shared):
    def refused() -> int:
        raise OSError("no files in memory")

    monkeypatch.setattr(host_store, "room_for_weights", lambda device: -1)
    if not shared:
        monkeypatch.setattr(sharing, "new_file", refused)
    model, expected = Alone(file, 1), whole.output()
    assert torch.equal(model.output(calls=2), expected)
    for resident in (0, whole.store.device_bytes, part(whole, 0.7)):
        held = model.engine.set_resident(resident)
        assert held.device_bytes == model.copies.used <= resident
    assert torch.equal(model.output(calls=2), expected)
    assert held.host_bytes == 0


def test_a_buffer_for_the_file_is_not_read_into_before_the_copy_from_it_is_over(file, whole, monkeypatch):
    """Without host memory all blocks come through one buffer. Copies take longer here than reading does."""
    monkeypatch.setattr(host_store, "room_for_weights", lambda device: -1)
    assert torch.equal(Alone(file, 1, rate=1e8).output(calls=2), whole.output())


ADDED = {
    "a matrix": (f"{LAST}.linear2.weight", 3),
    "a bias": (f"{LAST}.linear2.bias", None),
    "a norm": (f"{LAST}.norm.query_norm.scale", None),
    "a table outside": ("img_in.bias", None),
}


def adapt(model: Alone, instead: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, rank in ADDED.values():
        shape = model.checkpoint.shape(name)
        up = torch.randn(shape if rank is None or instead else (shape[0], rank), generator=generator)
        down = None if rank is None or instead else torch.randn(rank, shape[1], generator=generator)
        model.engine.stage.adapters.add(m.Adapt(name, up, down, 0.5, instead=instead))


@pytest.mark.parametrize("instead", [False, True], ids=["added", "in place of the file's"])
def test_what_is_added_to_streamed_weights_stays(file, whole, instead):
    """Also where the block gives way, and comes back."""
    model, plain, other = Alone(file, 1), whole.output(), Alone(file)
    for each in (model, other):
        adapt(each, instead)
    expected = other.output()
    assert mini.relative(expected, plain) > 0.01
    assert torch.equal(model.output(calls=2), expected)
    for resident in (whole.store.device_bytes, 0, 1):
        model.engine.set_resident(resident)
        other.engine.set_resident(whole.store.device_bytes if resident == 1 else resident)
    assert torch.equal(model.output(calls=2), expected)
    assert torch.equal(other.output(), expected)
    other.engine.set_resident(0)  # to be without what is added even so
    for each in (model, other):
        each.engine.stage.adapters.drop()
        each.engine.set_resident(part(whole, 0.8))
        assert torch.equal(each.output(calls=2), plain)


def test_a_merge_into_a_block_that_is_in_its_slot_shows_in_the_next_call(file, whole):
    """The first block is copied for the next micro-step as soon as the last one ends."""
    name, plain, models = "double_blocks.0.img_mod.lin.bias", whole.output(), (Alone(file, 1), Alone(file))
    for model in models:
        model.output()
        values = torch.randn(model.checkpoint.shape(name), generator=torch.Generator().manual_seed(2))
        model.engine.stage.adapters.add(m.Adapt(name, values, None, 0.5, instead=True))
    streamed, resident = (model.output() for model in models)
    assert mini.relative(resident, plain) > 1e-3
    assert torch.equal(streamed, resident)


def test_a_merge_leaves_memory_alone_until_the_copy_from_it_is_over(file):
    """The block that is copied for the next micro-step is merged into for the second time, into the same memory."""
    name, model, copies = "double_blocks.0.img_mod.lin.bias", Alone(file, 1, rate=1e7), []
    copy, shape = model.copies.copy, model.checkpoint.shape(name)

    def noted(into, source):
        before, ticket = source.clone(), copy(into, source)
        copies.append((into, before, ticket))
        return ticket

    model.store.overwrite(name, torch.zeros(shape))
    model.copies.copy = noted
    model.output()
    model.store.overwrite(name, torch.ones(shape))
    assert copies
    for into, before, ticket in copies[-slots.SLOTS :]:
        ticket.finish()
        assert torch.equal(into, before)


@pytest.mark.parametrize("kind", ["int8, rotated", "nvfp4", "weight_dtype"])
def test_every_format(file, tmp_path, kind):
    dtype, path = "fp32", file
    if kind == "weight_dtype":
        dtype = "fp8_e4m3fn"
    else:
        path = tmp_path / "quantised.safetensors"
        save_file({key: value.contiguous() for key, value in quantise_blocks(load_file(file), kind)[0].items()}, path)
    alone = Alone(path, dtype=dtype)
    expected = alone.output()
    model = Alone(path, 1, dtype=dtype)
    assert torch.equal(model.output(calls=2), expected)
    assert model.streamed_bytes() > alone.store.device_bytes / 2
    model.engine.set_resident(alone.store.device_bytes)
    assert torch.equal(model.output(), expected)
