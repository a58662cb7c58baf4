"""A request never depends on the one before it: not its result, not its sizes, not its keys and values."""

import threading

import pytest

from parallel_backend.client.call import ModelCall
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


def given(size: dict):
    return mini.inputs(**size)


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


def test_a_tensor_changed_in_place_is_sent_again(remote, mini_model):
    """A host may reuse a buffer: what the ranks hold is compared with values, so the client must hold values too."""
    model = remote(Degrees(pipe=2), fresh=True)
    x, timestep, tensors = given(SIZES[0])
    model.predict(ModelCall(x, timestep, tensors), lambda: None)
    tensors["pooled"] += 1.0
    output = model.predict(ModelCall(x, timestep, tensors), lambda: None)
    assert mini.relative(output, mini.reference(mini_model, x, timestep, tensors)) <= 1e-5
