"""ComfyUI's progress events."""

import json
import struct
import time
from collections.abc import Callable
from typing import Any

from websocket import WebSocket, create_connection

PREVIEW, TEXT_ON_NODE = 1, 3
"""First numbers of ComfyUI's binary frames: of a picture (number, kind of file, file) and of a text (number, length of the
node's id, id, text)."""


class Events:
    """ComfyUI's events for `client_id`, as (type, data). Use as a context manager.

    `texts`: (node, text) of the texts that were shown on nodes, `previews`: the previews' files, as far as events have been
    read.
    """

    def __init__(self, port: int, client_id: str):
        self._socket: WebSocket = create_connection(f"ws://127.0.0.1:{port}/ws?clientId={client_id}", timeout=60)
        self.texts: list[tuple[str, str]] = []
        self.previews: list[bytes] = []

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def until(
        self, kind: str, prompt_id: str, seconds: float = 120.0, where: Callable[[dict[str, Any]], bool] = lambda data: True
    ) -> list[tuple[str, dict[str, Any]]]:
        """This prompt's events up to and with the first of type `kind` whose data are as `where` asks."""
        deadline, seen = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            if isinstance(received := self._socket.recv(), bytes):
                self._note(received)
                continue
            event = json.loads(received)
            if event["data"].get("prompt_id") == prompt_id:
                seen.append((event["type"], event["data"]))
                if event["type"] == kind and where(event["data"]):
                    return seen
        raise TimeoutError(f"no {kind} within {seconds} s, but {[name for name, _ in seen]}")

    def _note(self, frame: bytes) -> None:
        kind, length = struct.unpack_from(">II", frame)
        if kind == TEXT_ON_NODE:
            node, text = frame[8 : 8 + length], frame[8 + length :]
            self.texts.append((node.decode(), text.decode()))
        elif kind == PREVIEW:
            self.previews.append(frame[8:])
