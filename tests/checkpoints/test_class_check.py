"""A checkpoint that its class cannot compute is refused on the client, by the file's name, before a rank starts."""

import threading

import pytest
import torch

from parallel_backend.checkpoints import checkpoint as opening
from parallel_backend.checkpoints import class_check
from parallel_backend.checkpoints.checkpoint import open_checked, open_checkpoint
from parallel_backend.checkpoints.stand_in_values import StandInValues
from parallel_backend.families import FAMILIES
from testing import real_sizes
from testing.cases import all_cases

REAL = real_sizes.REAL_MODELS
CASE = all_cases()[0]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return CASE.save(CASE.model(), tmp_path_factory.mktemp("file") / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_class_takes_its_own_checkpoint(monkeypatch, tmp_path, case):
    ran = []
    monkeypatch.setattr(class_check, "_run", lambda *each, run=class_check._run: ran.append(run(*each)))
    class_check._class_shapes.cache_clear()
    open_checkpoint(case.save(case.model(), tmp_path / "model.safetensors"))
    assert ran


def test_values_that_are_asked_for_are_ones():
    with torch.device("meta"), StandInValues():
        tensor = torch.zeros(2, 3)
        assert tensor[0, 0].item() == 1.0 and tensor[0].tolist() == [1.0] * 3 and bool(tensor[0, 0])
        assert int(torch.zeros((), dtype=torch.int64)) == 1
        for copy in (tensor.cpu(), tensor.to("cpu"), tensor.to(device=torch.device("cpu"), dtype=torch.int64)):
            assert copy.sum().item() == 6 and not copy.is_meta
            assert (copy * tensor).is_meta and torch.cat((tensor, copy)).shape == (4, 3)
        assert tensor.long().flatten().bincount().cpu().tolist() == [6]
        with pytest.raises(RuntimeError):
            tensor.cpu() @ tensor


@pytest.mark.parametrize("name", REAL)
def test_published_sizes_are_taken(tmp_path, name):
    open_checkpoint(REAL[name].save(tmp_path / "model.safetensors"))


def test_torchs_generator_stays_where_it_is(file):
    class_check._class_shapes.cache_clear()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    open_checkpoint(file)
    assert torch.equal(before, torch.get_rng_state()), "a sampler's noise would be another one"


def test_other_threads_build_their_modules_as_ever(file, monkeypatch):
    """ComfyUI loads an encoder while its server asks for a plan."""
    made = []

    def elsewhere():
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 2).weight.device.type))
        thread.start()
        thread.join()
        return type(FAMILIES[CASE.family]).transformer_class(FAMILIES[CASE.family])

    class_check._class_shapes.cache_clear()
    monkeypatch.setitem(FAMILIES[CASE.family].__dict__, "transformer_class", elsewhere)
    open_checkpoint(file)
    assert made == ["cpu"]


def test_a_rank_does_not_build_the_class_twice(file, monkeypatch):
    monkeypatch.setattr(opening, "check_class", lambda *_: pytest.fail("the client has done it"))
    open_checked(file)
