"""Headers of messages, and whole streams of them through a pipe."""

import json
import random
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

import torch

from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.encoding import MAX_TENSOR_BYTES, MAX_TENSORS

from . import damage
from .runner import Case

STREAM_BYTES = 100_000
"""What a pipe takes at once, so that nobody has to read meanwhile."""


def headers(examples: list[Any]):
    def make(rng: random.Random) -> Case:
        return lambda: decode(header(rng, examples))

    return make


def header(rng: random.Random, examples: list[Any]) -> bytes:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        named = [rng.choice([*m._TYPES, *damage.TEXTS]), *rng.choice([(0, 0), (1, 2), ()])]
        return json.dumps([*named, *(damage.value(rng) for _ in range(rng.randrange(13)))]).encode()
    if kind == 2:
        return b"[" * rng.choice((10, 1000, 100_000)) + b"]" * rng.choice((10, 1000, 100_000))
    sound = m.encode(rng.choice(examples))[0]
    if kind < 5:
        return damage.bytes_of(rng, sound)
    return damage.text(rng, json.loads(sound))


def decode(data: bytes) -> str:
    try:
        _, pending = m.decode_header(data)
    except m.BadMessage:
        return "refused"
    assert len(pending) <= MAX_TENSORS
    assert sum(each.nbytes for each in pending) <= MAX_TENSOR_BYTES
    assert all(each.tensor.untyped_storage().nbytes() == 0 for each in pending), "memory before any bytes have come"
    return "read"


def streams(examples: list[Any]):
    def make(rng: random.Random) -> Case:
        data = b"".join(frames(rng.choice(examples)) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.8:
            data = damage.bytes_of(rng, data)
        data = data[:STREAM_BYTES]
        return lambda: receive(data)

    return make


def frames(message: Any) -> bytes:
    """What a Channel sends: every frame behind its length (multiprocessing's own form)."""
    written, tensors = m.encode(message)
    contents = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.numel()]
    return b"".join(struct.pack("!i", len(part)) + part for part in (written, *contents))


def receive(data: bytes) -> str:
    """Read until the end or the first thing that is no message."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * STREAM_BYTES)
    ours.settimeout(10)
    channel = Channel(Connection(theirs.detach()))
    try:
        ours.sendall(data)
        ours.close()
        read = 0
        while True:
            try:
                channel.receive()
            except m.BadMessage:
                return "refused"
            except (EOFError, OSError):
                return "ended" if read else "ended before the first message"
            read += 1
    finally:
        ours.close()
        channel.close()
