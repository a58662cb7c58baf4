"""As much of a WebSocket client as it takes to read ComfyUI's progress events. Standard library only."""

import base64
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

TEXT = 1
PREVIEW, TEXT_ON_NODE = 1, 3
"""First numbers of ComfyUI's binary frames: of a picture (number, kind of file, file) and of a text (number, length of the
node's id, id, text)."""


class Events:
    """ComfyUI's events for `client_id`, as (type, data). Use as a context manager.

    `texts`: (node, text) of the texts that were shown on nodes, `previews`: the previews' files, as far as events have been
    read.
    """

    def __init__(self, port: int, client_id: str):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET /ws?clientId={client_id} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self._socket.sendall("\r\n".join((*lines, "", "")).encode())
        self._file = self._socket.makefile("rb")
        self.texts: list[tuple[str, str]] = []
        self.previews: list[bytes] = []
        assert b" 101 " in self._file.readline()
        while self._file.readline() != b"\r\n":
            pass

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def until(
        self, kind: str, prompt_id: str, seconds: float = 120.0, where: Callable[[dict[str, Any]], bool] = lambda data: True
    ) -> list[tuple[str, dict[str, Any]]]:
        """This prompt's events up to and with the first of type `kind` whose data are as `where` asks."""
        deadline, seen = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            event = self._next()
            if event is not None and event[1].get("prompt_id") == prompt_id:
                seen.append(event)
                if event[0] == kind and where(event[1]):
                    return seen
        raise TimeoutError(f"no {kind} within {seconds} s, but {[name for name, _ in seen]}")

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        """The next text frame; None for one of another kind. A server's frames are neither masked nor, here, split."""
        opcode, length = self._file.read(2)
        if length >= 126:
            length = int.from_bytes(self._file.read(2 if length == 126 else 8), "big")
        payload = self._file.read(length)
        if opcode & 15 != TEXT:
            self._note(payload)
            return None
        message = json.loads(payload)
        return message["type"], message["data"]

    def _note(self, frame: bytes) -> None:
        kind, length = struct.unpack_from(">II", frame)
        if kind == TEXT_ON_NODE:
            node, text = frame[8 : 8 + length], frame[8 + length :]
            self.texts.append((node.decode(), text.decode()))
        elif kind == PREVIEW:
            self.previews.append(frame[8:])
