"""Which failures of a call a run outlives, and with what it goes on."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.processes.pool import DeviceFull, RankError, RankLost
from testing import mini
from testing.models import Cancelled

BEFORE = Degrees(pipe=2, ulysses=2)
CUDA = tuple(f"cuda:{index}" for index in range(4))


class Model:
    """On ranks. `learned`: what its MemoryGuard says of the next try."""

    learned = ""

    def learn(self, error):
        return self.learned


@pytest.fixture
def stub(patcher):
    """A MODEL in step 2 of 3 of a run on four GPUs, whose class is proven in every mode."""
    stub = patcher.stub
    own = stub.own
    stub.setup = replace(stub.setup, devices=CUDA, degrees=BEFORE)
    stub.run.proof = Proof(own.blocks, "", "", "", latent=own.latent, bands="", tensor="")
    sigmas = torch.linspace(1, 0, 4)
    stub.run.call = 0.0, {"sample_sigmas": sigmas, "sigmas": sigmas[1:2]}
    return stub


@pytest.fixture
def kept(module, stub):
    """`kept(*failures)`: what comes of a call that fails so, one after the other. The setups of its tries."""

    def call(*failures, learned=""):
        setups, left = [], list(failures)

        def load():
            setups.append(stub.setup)
            model = Model()
            model.learned = learned
            return model

        def work(model):
            if left:
                raise left.pop(0)

        module("model.run.kept_run").kept(stub, load, work)
        return setups

    return call


def test_a_lost_gpu_is_left_out_until_the_run_ends(module, stub, kept):
    usual = stub.setup
    setups = kept(RankLost("", ("cuda:1",), "did not answer"), RankLost("", ("cuda:0",), "died"))
    assert [(each.devices, each.degrees) for each in setups] == [
        (CUDA, BEFORE),
        (("cuda:0", "cuda:2", "cuda:3"), Degrees(pipe=3)),
        (("cuda:2", "cuda:3"), Degrees(pipe=2)),
    ]
    assert stub.run.lines == [
        "cuda:1 did not answer in step 2 of 3. The run goes on with cuda:0, cuda:2, cuda:3",
        "cuda:0 died in step 2 of 3. The run goes on with cuda:2, cuda:3",
    ]
    module("model.run.kept_run").end(stub)
    assert stub.setup == usual


def test_ranks_that_all_hang_start_again_on_the_same_gpus(stub, kept):
    assert kept(RankLost("", (), "did not answer")) == [stub.setup] * 2
    assert stub.run.lines[0].startswith("the ranks did not answer in step 2 of 3. The run goes on with cuda:0, cuda:1")


def test_a_full_device_keeps_its_place_and_is_tried_again_if_that_helps(stub, kept):
    with pytest.raises(DeviceFull):
        kept(DeviceFull("", 1))
    assert stub.run.lines == []


def test_a_full_device_with_weights_to_stream_is_tried_again(stub, kept):
    assert kept(DeviceFull("", 1), learned="it streams more") == [stub.setup] * 2
    assert stub.run.lines == ["it streams more"]


@pytest.mark.parametrize("error", [RankError("raised"), ValueError("latent: not finite"), Cancelled()], ids=repr)
def test_other_failures_end_the_run(kept, error):
    with pytest.raises(type(error)):
        kept(error)


def test_a_third_loss_ends_the_run(kept):
    with pytest.raises(RankLost):
        kept(*(RankLost("", (name,), "died") for name in CUDA[:3]))


def test_without_keep_run_every_failure_ends_the_run(stub, kept):
    stub.setup = replace(stub.setup, keep_run=False)
    with pytest.raises(RankLost):
        kept(RankLost("", ("cuda:1",), "died"))
    with pytest.raises(DeviceFull):
        kept(DeviceFull("", 1), learned="it streams more")


def test_keep_run_is_no_reason_to_load_again(mini_file):
    setup = mini.setup(mini_file, "fp32", ("cpu",), Degrees(), "auto")
    assert replace(setup, keep_run=False) == setup
