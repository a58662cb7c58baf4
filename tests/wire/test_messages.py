"""The encoding of messages: everything that is sent arrives equal, and nothing that arrives can do more than be refused."""

import contextlib
import dataclasses
import json
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from parallel_backend.core.block_changes import BlockChanges, NormalizedGuidance
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.quickstart.model import mini_flux
from parallel_backend.wire import channel, encoding
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import FRAME_BYTES, Channel

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
    "transposed": torch.arange(6.0).view(2, 3).T,
    "a slice": torch.arange(20.0).view(4, 5)[1:3, ::2],
}

MESSAGES = [
    m.OpenSegment(1, 4096),
    m.DropSegment(2**63),
    m.Ready(3),
    m.Load(
        Setup(
            Path("/a folder/ü.safetensors"), "bf16", ("cpu",) * 4, Degrees(pipe=2, ulysses=2), "auto", own_class=mini_flux()
        ),
        (Span(0, 3), Span(3, 8)),
        (1.0,),
    ),
    m.Loading(1, 0.25),
    m.Loaded(1, 2**40, ("a.weight", "a.bias"), 2**39),
    m.SetResident((2**40, 0)),
    m.Residency(1, 2**40, 2**39),
    m.Unload(),
    m.Unloaded(0),
    m.DropAdapters(),
    m.Adapt("a.weight", TENSORS["bf16"], TENSORS["fp32"], -0.5),
    m.Adapt("a.bias", TENSORS["scalar"], None, 1.0, 2, True),
    m.Weigh((1.0, 0.0)),
    m.AdaptersSent(),
    m.Adapted(1, 2**40, 7),
    m.PutConditioning(7, (8, 6), 0, 2, TENSORS),
    m.PutConditioning(
        9,
        (8, 6),
        0,
        2,
        {},
        "frames",
        4,
        BlockChanges(("a.1",), NormalizedGuidance(5.0, 1.5, 0.5, Span(1, 2), Span(0, 1))),
    ),
    m.DropConditioning(7),
    m.Step(1, 2, 7, Span(4, 8), False, True, False, Span(0, 1), TENSORS["fp32"], (), (), torch.ones(0)),
    m.Step(
        1, 0, 7, Span(0, 8), True, False, True, Span(0, 0), torch.zeros(0), (("a.1", 0),), (torch.ones(1, 2),), torch.ones(1)
    ),
    *(m.Output(1, 5, tensor) for tensor in TENSORS.values()),
    m.OpenRun(3, True),
    m.CloseRun(4),
    m.Probe("/a folder/ü", "fp32", own_class=mini_flux()),
    m.Probed(1, {"blocks": (0.25, 1e-9)}, (0.5, 0.0), None),
    m.RunStats(0, 4, 10, 0.25, 0.5, 1e-9, {"pipe": 2**40, "ulysses": 0}, 5, 6),
    m.PutVAE("ü-1", '{"a": [1, null]}', TENSORS, m.RunVAE(TENSORS["bf16"], (3, 2), True)),
    m.PutVAE("ü-1", "{}", TENSORS, None, (0, 2)),
    m.BeginVAE("ü-1", 2**40),
    m.VAEBegun(1, True, 2**40, "why"),
    m.DropVAE(),
    m.RunVAE(TENSORS["bf16"], (), False),
    m.VAEOutput(1, TENSORS["bf16"]),
    m.EndVAE(),
    m.ReadMemory(),
    m.DeviceMemoryReport(1, "ü GPU-1", 2**40, 5, 0, None),
    m.DeviceMemoryReport(0, "", None, 0, 0, 2**40, "ü", 2**50, 25e9, 7),
    m.ReleaseUnused(),
    m.UnusedReleased(1, 2**40),
    m.Failure(1, "loading", True, "OSError: ü", 'Traceback\n  File "a"'),
    m.BeginTimeline(),
    m.ReadTimeline(),
    m.Timeline(1, TENSORS["fp64"], TENSORS["int64"], 2**40),
    m.ProbeLinks((1, 2**20)),
    m.LinksProbed(0, "a device", 2**34, None, {1: ((1, 1e-5), (2**20, 0.25))}, 0.125),
    m.Stop(),
    m.HeartbeatMessage(1, "micro-step 12", 2**40, True),
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


@pytest.fixture
def ends():
    """A sender and a receiver."""
    ends = [Channel(end) for end in Pipe(duplex=True)]
    yield ends
    for each in ends:
        each.close()


def through_a_pipe(*messages):
    sender, receiver = (Channel(end) for end in Pipe(duplex=True))
    thread = threading.Thread(target=lambda: [sender.send(message) for message in messages])
    thread.start()
    received = [receiver.receive().message for _ in messages]
    thread.join()
    sender.close()
    with pytest.raises((EOFError, OSError)):
        receiver.receive()
    receiver.close()
    return received


@pytest.mark.parametrize("model", [None, 3])
@pytest.mark.parametrize("request_id", [None, 1, 2**127])
def test_a_request_and_its_replies_have_its_id_and_the_models_number(request_id, model):
    header, tensors = m.encode(m.Output(1, 5, TENSORS["fp32"]), request_id, model=model)
    (message, *found), pending = m.decode_header(header)
    assert (found, message.seq, len(pending)) == ([request_id, model], 5, len(tensors))


@pytest.mark.parametrize("numbers", [[-1, 0], [2**128, 0], [True, 0], [1.0, 0], [1, -1], [1], [1, 2, 3]], ids=repr)
def test_what_is_no_request_id_or_model_is_refused(numbers):
    with pytest.raises(m.BadMessage):
        m.decode_header(json.dumps(["Unload", *numbers]).encode())


def test_many_in_a_row_stay_in_step():
    assert equal(tuple(through_a_pipe(*MESSAGES)), tuple(MESSAGES))


def test_a_message_whose_tensor_has_no_bytes_is_not_begun(ends, monkeypatch):
    """Such as one of torch.compile's while it traces: were the header sent before, it would take its bytes from the next."""
    whole, bytes_of = m.Output(1, 5, TENSORS["fp32"]), channel._bytes

    def bytes_but_of_integers(tensor):
        if not tensor.is_floating_point():
            raise RuntimeError("no storage")
        return bytes_of(tensor)

    monkeypatch.setattr(channel, "_bytes", bytes_but_of_integers)
    sender, receiver = ends
    with pytest.raises(RuntimeError, match="no storage"):
        sender.send(m.PutConditioning(7, (8, 6), 0, 2, {"a": TENSORS["fp32"], "b": TENSORS["int64"]}))
    assert sender.begun == 0
    sender.send(whole)
    assert equal(receiver.receive().message, whole)


def test_nothing_follows_a_message_that_was_cut_short(ends, monkeypatch):
    sender, receiver = ends
    ours, theirs = sender.connection, receiver.connection
    frames, write = [], ours.send_bytes

    def send_bytes(frame):
        if frames:
            raise KeyboardInterrupt
        frames.append(frame)
        write(frame)

    monkeypatch.setattr(ours, "send_bytes", send_bytes)
    with pytest.raises(KeyboardInterrupt):
        sender.send(m.Output(1, 5, TENSORS["fp32"]))
    monkeypatch.undo()
    with pytest.raises(OSError):
        sender.send(m.Unload())
    with pytest.raises(EOFError):
        receiver.receive()
    theirs.send_bytes(b"still heard")
    assert ours.recv_bytes() == b"still heard"


def test_every_type_is_tried():
    types = {cls for cls in vars(m).values() if dataclasses.is_dataclass(cls)} - {Span}
    assert {type(message) for message in MESSAGES} == types


def output(dtype, shape) -> bytes:
    return json.dumps(["Output", 0, 0, 0, 1, [dtype, shape]]).encode()


EMPTY = [0, 2**65], [0, 2**62, 2**62], [2**62, 2**62, 0], [0] * 9
"""They have no bytes, so no limit on bytes sees them; torch raises a RuntimeError for their strides."""


@pytest.mark.parametrize("shape", [*EMPTY, [2**34], [2**16, 2**16, 2**16], [2**70], [-1], [-1, -1], [1.5], ["1"], [True], 7])
def test_tensors_too_large_or_of_no_size_are_refused(shape):
    with pytest.raises(m.BadMessage):
        m.decode_header(output("float32", shape))


def test_a_message_is_bounded_as_a_whole():
    """Its tensors together, and their number: each of them is small enough."""
    size = encoding.MAX_TENSOR_BYTES // 4

    def decoder(*shapes: list[int]) -> bytes:
        tensors = [[str(i), ["bool", shape]] for i, shape in enumerate(shapes)]
        return json.dumps(["PutVAE", 0, 0, "a", "", tensors, None, []]).encode()

    assert len(m.decode_header(decoder(*([size],) * 4))[1]) == 4
    with pytest.raises(m.BadMessage, match="bytes"):
        m.decode_header(decoder(*([size],) * 4, [1]))
    assert len(m.decode_header(decoder(*([],) * encoding.MAX_TENSORS))[1]) == encoding.MAX_TENSORS
    with pytest.raises(m.BadMessage, match="tensors"):
        m.decode_header(decoder(*([],) * (encoding.MAX_TENSORS + 1)))


WRONG = {
    "text for a number": ["Ready", 0, 0, "0"],
    "a truth value for a number": ["Ready", 0, 0, True],
    "a float for a whole number": ["Ready", 0, 0, 0.0],
    "below 0": ["Ready", 0, 0, -1],
    "beyond 128 bits": ["Ready", 0, 0, 2**128],
    "not finite": ["Loading", 0, 0, 0, float("nan")],
    "nothing for something": ["DropConditioning", 0, 0, None],
    "a field too few": ["Loading", 0, 0, 0],
    "a field too many": ["Ready", 0, 0, 0, 0],
    "a span that ends before it starts": ["Span", 0, 0, 3, 2],
    "a key twice": ["Probed", 0, 0, 0, [["a", [1.0]], ["a", [1.0]]], [1.0, 1.0], None],
    "a tensor for a number": ["Ready", 0, 0, ["float32", [1]]],
    "a number for a tensor": ["Output", 0, 0, 0, 1, 3],
    "a dtype that is none": ["Output", 0, 0, 0, 1, ["object", [1]]],
    "no such type": ["Unready", 0, 0, 0],
    "an object": {"$type": "Ready", "rank": 0},
    "a text": "Ready",
}


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG)
def test_every_field_is_held_to_its_type(header):
    with pytest.raises(m.BadMessage):
        m.decode_header(json.dumps(header).encode())


@pytest.mark.parametrize(
    "message",
    [
        m.Loaded(0, 1, ("a" * encoding.MAX_HEADER_BYTES,)),
        m.PutVAE("a", "", {str(index): torch.empty(0) for index in range(encoding.MAX_TENSORS + 1)}, None),
    ],
    ids=["header", "tensors"],
)
def test_what_is_too_large_is_not_sent(message):
    """The receiver would refuse it, and end the connection."""
    with pytest.raises(AssertionError, match=f"{type(message).__name__} is too large"):
        m.encode(message)


def test_a_tensor_of_several_frames_arrives_whole():
    large = torch.arange(FRAME_BYTES // 2 + 3, dtype=torch.int32)
    assert large.nbytes > 2 * FRAME_BYTES
    assert equal(through_a_pipe(m.Output(0, 1, large))[0], m.Output(0, 1, large))


@pytest.mark.parametrize("sent", [3, 16])
def test_a_tensor_of_the_wrong_length_is_refused(ends, sent):
    sender, receiver = ends
    sender.connection.send_bytes(m.encode(m.Output(0, 1, torch.zeros(2)))[0])
    sender.connection.send_bytes(bytes(sent))
    with pytest.raises(m.BadMessage):
        receiver.receive()


def test_a_header_too_long_is_refused():
    ours, theirs = Pipe(duplex=True)

    def send():
        with contextlib.suppress(OSError):  # the other end may be closed before all of it has gone
            ours.send_bytes(b" " * (encoding.MAX_HEADER_BYTES + 1))

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(m.BadMessage, match="a frame of more than"):
        Channel(theirs).receive()
    theirs.close()
    thread.join()
    ours.close()
