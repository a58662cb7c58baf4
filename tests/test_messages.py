"""The encoding of messages: everything that is sent arrives equal, and nothing that arrives can do more than be refused."""

import contextlib
import dataclasses
import json
import threading
from multiprocessing import Pipe

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend import messages as m
from parallel_backend.channel import Channel
from parallel_backend.layout import Span

TENSORS = {
    "fp32": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
    "fp64": torch.tensor([1 / 3, float("inf")], dtype=torch.float64),
    "bf16": torch.tensor([[1.0, -2.5, 3.140625]], dtype=torch.bfloat16),
    "fp16": torch.arange(5, dtype=torch.float16),
    "int64": torch.tensor([2**62, -1]),
    "int32": torch.tensor([[7]], dtype=torch.int32),
    "bool": torch.tensor([True, False, True]),
    "empty": torch.empty(2, 0, 5),
    "scalar": torch.tensor(0.5),
    "scalar bf16": torch.tensor(0.5, dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "a slice": torch.arange(20.0).view(4, 5)[1:3, ::2],
}

MESSAGES = [
    m.Ready(3),
    m.Load("/a folder/ü.safetensors", "bf16", (1, 2, 1, 1, 2, 1), "none", (1.0,), (Span(0, 3), Span(3, 8)), "auto"),
    m.Loading(1, 0.25),
    m.Loaded(1, 2**40, ("a.weight", "a.bias")),
    m.Unload(),
    m.Unloaded(0),
    m.DropAdapters(),
    m.Adapt("a.weight", TENSORS["bf16"], TENSORS["fp32"], -0.5),
    m.Adapt("a.bias", TENSORS["scalar"], None, 1.0),
    m.Rescale((0.5, 1e-9)),
    m.AdaptersSent(6),
    m.Adapted(1, 6, 2**40),
    m.PutConditioning(7, (8, 6), 0, 3, 2, TENSORS),
    m.PutConditioning(8, (8, 6), 12, 0, 1, {}),
    m.DropConditioning(7),
    m.Step(1, 2, 7, Span(4, 8), False, True, False, Span(0, 1), TENSORS["fp32"], {}, (), None),
    m.Step(
        1, 0, 7, Span(0, 8), True, False, True, Span(0, 0), torch.zeros(0), {"a.1": 0}, (torch.ones(1, 2, 3),), torch.ones(1)
    ),
    *(m.Output(1, 5, tensor) for tensor in TENSORS.values()),
    m.OpenRun(3, True),
    m.CloseRun(4),
    m.Probe("/a folder/ü", "fp32", (64, 16)),
    m.Probed(1, {"blocks": (0.25, 1e-9)}, (0.5, 0.0), None),
    m.RunStats(0, 4, 10, 0.25, 0.5, 1e-9, {"pipe": 2**40, "ulysses": 0}, 5, 6),
    m.PutDecoder("ü-1", TENSORS),
    m.Decode(2**127, "ü-1", TENSORS["bf16"], 2**40),
    m.Decoded(1, 2**127, TENSORS["bf16"], False, {"rows": 2**40}),
    m.Decoded(0, 0, None, True, {}),
    m.Failure(1, "loading", True, "OSError: ü", 'Traceback\n  File "a"'),
    m.Failure(1, "micro-step 12", False, "", ""),
    m.BeginTimeline(),
    m.ReadTimeline(9),
    m.Timeline(1, 9, TENSORS["fp64"], TENSORS["int64"], 2**40),
    m.RunStats(0, 4, 10, 0.25, 0.5, 1e-9, {}, 5, 6, {"blocks.0": m.BlockStats(0.125, {"ring": 7})}),
    m.BlockStats(0.125, {}),
    m.ProbeLinks((1, 2**20)),
    m.LinksProbed(0, "a device", 2**34, None, {1: ((1, 1e-5), (2**20, 0.25))}, {1: True}, 0.125),
    m.Stop(),
]


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def through_a_pipe(*messages):
    ours, theirs = Pipe(duplex=True)
    sender, receiver = Channel(ours), Channel(theirs)
    thread = threading.Thread(target=lambda: [sender.send(message) for message in messages])
    thread.start()
    received = [receiver.receive() for _ in messages]
    thread.join()
    sender.close()
    with pytest.raises((EOFError, OSError)):
        receiver.receive()
    receiver.close()
    return received


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert equal(through_a_pipe(message)[0], message)


def test_many_in_a_row_stay_in_step():
    assert equal(tuple(through_a_pipe(*MESSAGES)), tuple(MESSAGES))


def test_every_type_is_tried():
    types = {cls for cls in vars(m).values() if dataclasses.is_dataclass(cls)} - {Span}
    assert {type(message) for message in MESSAGES} == types


def test_the_comparison_sees_a_difference():
    assert not equal(m.Output(1, 5, torch.zeros(2)), m.Output(1, 5, torch.zeros(2, dtype=torch.bfloat16)))
    assert not equal(MESSAGES[1], dataclasses.replace(MESSAGES[1], stage_blocks=(Span(0, 3), Span(3, 9))))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*m._TYPES, "object", "Any", "", "__class__"])
sizes = st.integers(-2, 6) | st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, 2**70]) | st.booleans() | json_values
tensors = st.builds(
    lambda dtype, shape, more: {"$tensor": [dtype, shape, *more]},
    st.sampled_from([*m._DTYPES, "float8_e4m3fn", "nonsense"]) | json_values,
    st.lists(sizes, max_size=4) | json_values,
    st.lists(json_values, max_size=1),
)
shaped = st.recursive(
    json_values | tensors,
    lambda inner: (
        st.builds(lambda name, fields: {"$type": name, **fields}, names | json_values, st.dictionaries(st.text(), inner))
        | st.builds(lambda items: {"$dict": items}, st.lists(st.tuples(st.text(max_size=4) | json_values, inner)) | inner)
        | st.builds(lambda number: {"$type": "Ready", "rank": number}, inner)
        | st.builds(lambda start, stop: {"$type": "Span", "start": start, "stop": stop}, inner, inner)
        | st.builds(lambda value: {"$type": "Output", "rank": 0, "seq": 1, "value": value}, inner)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def refused_or_read(header: bytes) -> None:
    try:
        _, made = m.decode_header(header)
    except m.BadMessage:
        return
    for tensor in made:
        assert tensor.nbytes <= m.MAX_TENSOR_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(header):
    refused_or_read(header)


@given(shaped)
def test_any_header_of_the_right_shape_is_refused_or_read(value):
    refused_or_read(json.dumps(value).encode())


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_header_is_refused_or_read(message, data):
    header = bytearray(m.encode(message)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    refused_or_read(bytes(header[: data.draw(st.integers(1, len(header)))]))


def test_deep_nesting_is_refused():
    with pytest.raises(m.BadMessage):
        m.decode_header(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("shape", [[2**33], [2**16, 2**16, 2**16], [2**70], [-1], [-1, -1], [1.5], ["1"], 7, None])
def test_tensors_too_large_or_of_no_size_are_refused(shape):
    with pytest.raises(m.BadMessage):
        m.decode_header(json.dumps({"$tensor": ["float32", shape]}).encode())


@pytest.mark.parametrize("shape", [[0, 2**65], [0, 2**62, 2**62], [2**62, 2**62, 0]])
def test_empty_tensors_with_axes_beyond_torchs_are_refused(shape):
    """They have no bytes, so no limit on bytes sees them; torch raises a RuntimeError for their strides."""
    with pytest.raises(m.BadMessage):
        m.decode_header(json.dumps({"$tensor": ["float32", shape]}).encode())


@pytest.mark.parametrize(
    "sent",
    [
        3,
        16,
    ],
)
def test_a_tensor_of_the_wrong_length_is_refused(sent):
    ours, theirs = Pipe(duplex=True)
    ours.send_bytes(m.encode(m.Output(0, 1, torch.zeros(2)))[0])
    ours.send_bytes(bytes(sent))
    with pytest.raises(m.BadMessage):
        Channel(theirs).receive()
    ours.close()
    theirs.close()


def test_a_header_too_long_ends_the_connection():
    ours, theirs = Pipe(duplex=True)

    def send():
        with contextlib.suppress(OSError):  # the other end may be closed before all of it has gone
            ours.send_bytes(b" " * (m.MAX_HEADER_BYTES + 1))

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(OSError):
        Channel(theirs).receive()
    theirs.close()
    thread.join()
    ours.close()


def test_what_is_no_plain_value_does_not_cross():
    with pytest.raises(AssertionError, match="cannot cross processes"):
        m.encode(m.Ready(object()))
