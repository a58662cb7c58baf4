"""Tensors in memory that a client shares with a rank: they arrive without a byte in the pipe, and nothing else does."""

import array
import os
import socket
from multiprocessing import Pipe

import pytest
import torch

from parallel_backend.wire import channel as channels
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.shared_memory import DropSegment, OpenSegment, make_segment
from parallel_backend.wire.tcp import socket_of

fcntl = pytest.importorskip("fcntl", reason="files without a name are Linux's")

NBYTES = 1 << 20
FIONREAD = 0x541B
"""ioctl of a socket: bytes that wait in it."""


class Ends:
    """The two ends of a channel over which memory is lent. `opened`, `returned`: of the rank's end, in bytes."""

    def __init__(self):
        ours, theirs = Pipe(duplex=True)
        self.opened, self.returned = [], []
        self.client, self.rank = Channel(ours, lends=True), Channel(theirs, borrowed=self._borrowed)

    def _borrowed(self, memory: torch.Tensor):
        self.opened.append(memory.nbytes)
        return lambda: self.returned.append(memory.nbytes)

    def crossed(self, message):
        """The message as it arrives, and the bytes that the socket had of it."""
        self.client.send(message)
        count = array.array("i", [0])
        fcntl.ioctl(self.rank.connection.fileno(), FIONREAD, count)
        return self.rank.receive().message, count[0]

    def close(self) -> None:
        self.client.close()
        self.rank.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def segment():
    segment = make_segment(3, NBYTES)
    yield segment
    segment.close()


def conditioning(*tensors: torch.Tensor) -> m.PutConditioning:
    return m.PutConditioning(1, (2, 2), 0, 1, {str(number): tensor for number, tensor in enumerate(tensors)})


def test_a_tensor_in_a_segment_arrives_without_its_bytes(ends, segment):
    ends.client.lend(segment)
    large = segment.tensor(torch.bfloat16, [2, 1000, 50], 128).copy_(torch.randn(2, 1000, 50))
    small = torch.arange(5)
    message, nbytes = ends.crossed(conditioning(large, small))
    assert nbytes < 1000 < large.nbytes
    assert torch.equal(message.tensors["0"], large)
    assert torch.equal(message.tensors["1"], small)
    assert ends.opened == [NBYTES]
    large.zero_()
    assert not message.tensors["0"].any()  # one memory


def test_what_is_not_whole_in_a_segment_is_sent_as_ever(ends, segment):
    ends.client.lend(segment)
    values = segment.tensor(torch.float32, [64, 64], 0).copy_(torch.randn(64, 64))
    other = torch.randn(64, 64)
    message, nbytes = ends.crossed(conditioning(values[:, :8], other, values[:0]))
    assert nbytes > other.nbytes
    for name, tensor in {"0": values[:, :8], "1": other, "2": values[:0]}.items():
        assert torch.equal(message.tensors[name], tensor)


def test_a_segment_that_is_dropped_is_pointed_into_no_more_and_stays_until_the_rank_comes_to_it(ends, segment):
    """Who receives does not let it go: on a GPU that waits for the device, of which another thread may capture a graph."""
    ends.client.lend(segment)
    values = segment.tensor(torch.float32, [64], 0).fill_(1.0)
    message, _ = ends.crossed(conditioning(values))
    ends.client.drop(segment.number)
    assert ends.rank.receive().message == DropSegment(segment.number)
    assert ends.returned == []
    later, _ = ends.crossed(conditioning(values))
    assert ends.returned == []
    ends.rank.return_segment(segment.number)
    assert ends.returned == [NBYTES]
    values.fill_(2.0)
    assert later.tensors["0"].eq(1.0).all()  # its own
    assert message.tensors["0"].eq(2.0).all()


def test_an_unloading_lets_segments_of_models_go_and_no_others(ends, segment):
    of_model = make_segment(4, NBYTES)
    ends.client.lend(segment)
    ends.client.lend(of_model, 7)
    values = segment.tensor(torch.float32, [64], 0).fill_(1.0)
    ends.crossed(conditioning(values))
    ends.rank.return_segments()
    assert ends.returned == [NBYTES]
    later, _ = ends.crossed(conditioning(values))
    values.fill_(2.0)
    assert later.tensors["0"].eq(2.0).all()  # still one memory
    of_model.close()


def header(place: str) -> bytes:
    return f'["Output",0,0,1,5,["float32",{place}]]'.encode()


@pytest.mark.parametrize(
    "place",
    [
        "[16],4,0",  # a segment that is not open
        f"[16],3,{NBYTES}",
        f"[16],3,{NBYTES - 32}",
        f"[{NBYTES}],3,0",
        "[16],3,4",  # not aligned
        "[16],3,-64",
        '[16],"3",0',
        "[16],3,true",
        "[16],3",
        "[1099511627776,1099511627776,0],3,0",
    ],
)
def test_a_place_that_is_not_in_an_open_segment_is_refused(place, segment):
    with pytest.raises(m.BadMessage):
        m.decode_header(header(place), {3: segment})


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1, 1 << 40])
def test_a_segment_of_another_size_is_refused(ends, segment, nbytes):
    ends.client.send(OpenSegment(1, nbytes))
    with socket_of(ends.client.connection) as ours:
        socket.send_fds(ours, [channels.HANDLE_FOLLOWS], [segment.handle])
    with pytest.raises(m.BadMessage):
        ends.rank.receive()


def test_a_segment_that_could_be_cut_short_is_refused(ends):
    """Whoever reads beyond the end of a file that was cut is killed by the system."""
    handle = os.memfd_create("open")
    os.truncate(handle, NBYTES)
    ends.client.send(OpenSegment(1, NBYTES))
    with socket_of(ends.client.connection) as ours:
        socket.send_fds(ours, [channels.HANDLE_FOLLOWS], [handle])
    with pytest.raises(m.BadMessage, match="shrink"):
        ends.rank.receive()
    os.close(handle)


def test_a_segment_cannot_be_cut_short(segment):
    with pytest.raises(PermissionError):
        os.truncate(segment.handle, 1)


def test_a_segment_with_a_number_that_is_taken_is_refused(ends, segment):
    ends.client.lend(segment)
    ends.client.lend(segment)
    with pytest.raises(m.BadMessage, match="1 segments are open"):
        ends.rank.receive()


def test_a_client_that_opens_ever_more_segments_is_refused(ends, monkeypatch):
    monkeypatch.setattr(channels, "MAX_SEGMENTS", 1)
    segments = [make_segment(number, 4096) for number in (1, 2)]
    for segment in segments:
        ends.client.lend(segment)
        segment.close()
    with pytest.raises(m.BadMessage, match="1 segments are open"):
        ends.rank.receive()
