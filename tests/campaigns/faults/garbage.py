"""Bytes that are no message, as they could come over a control connection."""

import json
import os
import random
import struct
from multiprocessing.connection import Connection
from typing import Any

LENGTH = 1 << 40
TENSOR = [1 << 20, 1 << 10]
"""4 GB of float32, which never come."""


def write_raw(connection: Connection, data: bytes) -> None:
    """Past the framing: as many writes as it takes."""
    while data:
        data = data[os.write(connection.fileno(), data) :]


def send(connection: Connection, variant: str, rank: int, seed: int) -> None:
    """`variant`: see table.KINDS. `rank`: whose connection it is."""
    if variant == "bytes":
        write_raw(connection, random.Random(seed).randbytes(4096))
    elif variant == "nonsense":
        connection.send_bytes(json.dumps(["Output", "one", [1, 2]]).encode())
    elif variant == "length":
        write_raw(connection, struct.pack("!iQ", -1, LENGTH))
    elif variant == "cut short":
        write_raw(connection, struct.pack("!i", 500) + b'["Output", 1')
    elif variant == "tensor":
        connection.send_bytes(json.dumps(["Output", rank, 1, ["float32", TENSOR]]).encode())
    elif variant == "another rank":
        connection.send_bytes(json.dumps(["Unloaded", rank + 97]).encode())
    else:
        assert variant == "unknown message"
        connection.send_bytes(json.dumps(["Unloaded", rank]).encode())


def halves(message: Any, model: int | None = None) -> tuple[bytes, tuple[bytes, bytes]]:
    """A message of `model` with one tensor: its header, and the frame of the tensor's bytes in two parts."""
    import torch

    from parallel_backend.wire.messages import encode

    header, (tensor,) = encode(message, model=model)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    frame = struct.pack("!i", len(data)) + data
    return header, (frame[: len(frame) // 2], frame[len(frame) // 2 :])
