"""A request never depends on the one before it: not its result, not its sizes, not its keys and values."""

import functools
import threading

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.wire import channel
from testing import mini

pytestmark = pytest.mark.threads

DEGREES = [Degrees(pipe=2), Degrees(ulysses=2), Degrees(batch=2), Degrees(pipe=2, ulysses=2)]

SIZES = [
    {"batch": 2, "height": 16, "width": 12, "text": 7},
    {"batch": 2, "height": 16, "width": 12, "text": 2},
    {"batch": 2, "height": 16, "width": 12, "text": 20},
    {"batch": 1, "height": 16, "width": 12, "text": 7},
    {"batch": 3, "height": 22, "width": 8, "text": 5},
    {"batch": 2, "height": 8, "width": 8, "text": 1},
]


def given(size: dict, seed: int = 1):
    """Inputs of that size, or the arguments of a run: (noise, sigmas, prompt)."""
    return mini.inputs(**size, seed=seed)


def run(model, size: dict, warm_up: int, seed: int = 1, bands: int = 3, **options):
    x, _, tensors = given(size, seed)
    return sample_in_bands(model, x, linear_sigmas(3), Prompt(tensors, tensors, 1.0), bands, warm_up, **options)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_calls_of_any_size_in_any_order_without_a_restart(remote, mini_model, degrees):
    model = remote(degrees)
    expected = [mini.reference(mini_model, *given(size)) for size in SIZES]
    for order in (range(len(SIZES)), reversed(range(len(SIZES)))):
        for index in order:
            output = model.predict(ModelCall(*given(SIZES[index])), lambda: None)
            assert mini.relative(output, expected[index]) <= 1e-5, SIZES[index]
    assert remote(degrees).pool is model.pool


def test_a_call_that_cannot_be_sent_costs_the_next_one_nothing(remote, mini_model, monkeypatch):
    """Of two replicas the second one's latent has no bytes, as a tensor that torch.compile traces has none."""
    model, bytes_of = remote(Degrees(batch=2)), channel._bytes
    x, timestep, tensors = given(SIZES[0])
    expected = mini.reference(mini_model, x, timestep, tensors)
    model.predict(ModelCall(x, timestep, tensors), lambda: None)  # the ranks have its conditioning

    def bytes_but_of_large_values(tensor):
        here = threading.current_thread() is threading.main_thread()  # the ranks are other threads
        if here and tensor.is_floating_point() and tensor.numel() and tensor.abs().max() > 1e6:
            raise RuntimeError("no storage")
        return bytes_of(tensor)

    monkeypatch.setattr(channel, "_bytes", bytes_but_of_large_values)
    unsendable = x.clone()
    unsendable[1] = 1e7
    with pytest.raises(RuntimeError, match="no storage"):
        model.predict(ModelCall(unsendable, timestep, tensors), lambda: None)
    assert mini.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(each, marks=pytest.mark.full if place > 1 else ()) for place, each in enumerate(DEGREES)],
    ids=str,
)
@pytest.mark.parametrize("warm_up", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_equals_the_same_run_on_a_fresh_model(remote, degrees, warm_up):
    """Bit for bit, also without warm-up, where a first step that saw the last run's keys would show."""
    fresh = [run(remote(degrees, fresh=True), size, warm_up)[0] for size in SIZES[:3]]
    model = remote(degrees, fresh=True)
    for index in (0, 1, 2, 0):
        assert torch.equal(run(model, SIZES[index], warm_up)[0], fresh[index]), index
    another = run(model, SIZES[0], warm_up, seed=5)[0]
    assert not torch.equal(another, fresh[0])  # the control: the inputs do decide
    assert torch.equal(run(model, SIZES[0], warm_up)[0], fresh[0])


def test_the_comparison_sees_keys_of_the_run_before(remote, monkeypatch):
    """The control of the test above: two runs under one run number share their keys, and then the second one differs."""
    model = remote(Degrees(pipe=2), fresh=True)
    clean = run(model, SIZES[0], 0)[0]
    shared = model.open_run()
    monkeypatch.setattr(model, "open_run", lambda *options: shared)
    monkeypatch.setattr(model, "close_run", lambda number, poll: [])
    noise, _, tensors = given(SIZES[0])
    sigmas, prompt = linear_sigmas(3), Prompt(tensors, tensors, 1.0)
    first = sample_in_bands(model, noise, sigmas, prompt, 3, 0)[0]
    second = sample_in_bands(model, noise, sigmas, prompt, 3, 0)[0]
    assert torch.equal(first, clean)
    assert not torch.equal(second, clean)
    monkeypatch.undo()
    model.discard_run(shared)
    assert torch.equal(run(model, SIZES[0], 0)[0], clean)


def layer_bytes(size: dict) -> int:
    tokens = size["text"] + -(-size["height"] // 2) * -(-size["width"] // 2)
    return 2 * size["batch"] * tokens * mini.CONFIG["width"] * 4


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize(("extrapolate", "copies"), [pytest.param(False, 1, marks=pytest.mark.full), (True, 2)])
def test_buffers_are_of_this_run_only(remote, degrees, extrapolate, copies):
    """Keys and values of all layers and tokens, over all ranks, and nothing of the larger runs before.

    Extrapolation keeps those of the call before as well.
    """
    model = remote(degrees)
    layers = mini.CONFIG["double_blocks"] + mini.CONFIG["single_blocks"]
    for size in (SIZES[4], SIZES[0], SIZES[5], SIZES[0]):
        stats = run(model, size, 1, extrapolate=extrapolate)[1]
        assert sum(rank.buffer_bytes for rank in stats) == copies * layers * layer_bytes(size)
        assert {rank.run for rank in stats} == {stats[0].run}
    x, timestep, tensors = given(SIZES[0])
    model.predict(ModelCall(x, timestep, tensors), lambda: None)
    number = model.open_run()
    assert [rank.buffer_bytes for rank in model.close_run(number, lambda: None)] == [0] * degrees.world


def test_more_prompts_than_the_ranks_keep(remote, mini_model):
    """Conditioning that was dropped for newer ones is sent again when it comes back."""
    from parallel_backend.client.conditioning_cache import CONDITIONINGS_KEPT

    model = remote(Degrees(pipe=2), fresh=True)
    size = SIZES[5]
    for seed in (*range(CONDITIONINGS_KEPT + 3), 0, 1):
        x, timestep, tensors = given(size, seed)
        output = model.predict(ModelCall(x, timestep, tensors), lambda: None)
        assert mini.relative(output, mini.reference(mini_model, x, timestep, tensors)) <= 1e-5, seed


def test_a_tensor_changed_in_place_is_sent_again(remote, mini_model):
    """A host may reuse a buffer: what the ranks hold is compared with values, so the client must hold values too."""
    model = remote(Degrees(pipe=2), fresh=True)
    x, timestep, tensors = given(SIZES[0])
    model.predict(ModelCall(x, timestep, tensors), lambda: None)
    tensors["pooled"] += 1.0
    output = model.predict(ModelCall(x, timestep, tensors), lambda: None)
    assert mini.relative(output, mini.reference(mini_model, x, timestep, tensors)) <= 1e-5


def test_another_model_and_other_degrees_on_the_same_ranks(pools, remote, mini_model, tmp_path):
    other_config = mini.CONFIG | {"double_blocks": 1, "single_blocks": 2, "guidance": False}
    other = mini.random_model(other_config, seed=9)
    path = mini.save(other, tmp_path / "other.safetensors")
    for degrees in (Degrees(pipe=2), Degrees(ulysses=2), Degrees(pipe=2)):
        for load, config, reference in (
            (remote, mini.CONFIG, mini_model),
            (functools.partial(pools.mini, path), other_config, other),
        ):
            given = mini.inputs(config)
            output = load(degrees).predict(ModelCall(*given), lambda: None)
            assert mini.relative(output, mini.reference(reference, *given)) <= 1e-5


class Cancelled(Exception):
    pass


def test_what_a_cancelled_call_leaves_is_nothing_to_the_next_model(remote):
    """Its output arrives when another model listens already, which has sent nothing yet."""
    large = given({"batch": 4, "height": 32, "width": 32, "text": 7})
    model = remote(Degrees(pipe=2), fresh=True)
    expected = model.predict(ModelCall(*large), lambda: None)

    def poll() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        model.predict(ModelCall(*large), poll)
    assert torch.equal(remote(Degrees(pipe=2), fresh=True).predict(ModelCall(*large), lambda: None), expected)
