"""The server's part of the sidebar's panel (web/js/ranks_panel.js): the state of the ranks, which is sent while a panel is
open.

`POST /parallel_dit/ranks/open` and `/close` with {"client": the page's id on ComfyUI's socket}. An open panel gets the event
`parallel_dit.ranks` with {"pools": [PoolOverview as a dict]}, at most once a second and only when something has changed.
"""

import asyncio
import json
from dataclasses import asdict
from typing import Any

from parallel_backend.client.registry import registry

from .ui.host import prompt_server

EVENT, ROUTES = "parallel_dit.ranks", "/parallel_dit/ranks"
SECONDS = 1.0
"""Seconds between two updates of the panel."""
STEP = 1 << 27
"""Memory is rounded to this many bytes, so that small changes are not sent."""
MOST_BYTES = 1 << 12
"""The largest request in bytes."""


class OpenPanels:
    """The pages whose panel is open, and the task that sends them the state. Used on the server's event loop alone."""

    def __init__(self, server: Any):
        self._server = server
        self._clients: dict[str, Any] = {}
        """Page -> the last state that was sent to it."""
        self._task: asyncio.Task | None = None

    def open(self, client: str) -> None:
        """Begin to send the state to the page `client`. It gets the first state within SECONDS."""
        self._clients[client] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._tell())

    def close(self, client: str) -> None:
        self._clients.pop(client, None)

    async def _tell(self) -> None:
        try:
            while True:
                for client in [each for each in self._clients if each not in self._server.sockets]:  # its page has gone
                    self.close(client)
                if not self._clients:
                    return
                found = shown()
                for client, told in self._clients.items():
                    if told != found:
                        self._clients[client] = found
                        self._server.send_sync(EVENT, found, client)
                await asyncio.sleep(SECONDS)
        finally:
            self._task = None


def shown() -> dict[str, Any]:
    """The state that a panel shows."""
    pools = [asdict(pool) for pool in registry().overview()]
    for rank in (rank for pool in pools for rank in pool["ranks"]):
        rank["free"] = rank["free"] // STEP * STEP
    return {"pools": pools}


def add_routes() -> None:
    """Add the routes, when ComfyUI imports the pack. Does nothing if nodes are run without ComfyUI's server."""
    if (server := prompt_server()) is None:
        return
    from aiohttp import web  # installed wherever ComfyUI runs as a server

    panels = OpenPanels(server)

    async def client_of(request: web.Request) -> str:
        """The page of a request. HTTPBadRequest for one that is not on ComfyUI's socket."""
        body = await request.read()
        try:
            client = json.loads(body)["client"] if len(body) <= MOST_BYTES else None  # whatever charset the header names
        except (ValueError, TypeError, KeyError, RecursionError):
            client = None
        if not isinstance(client, str) or client not in server.sockets:
            raise web.HTTPBadRequest(text="client: expected the id of a page on ComfyUI's socket.")
        return client

    @server.routes.post(f"{ROUTES}/open")
    async def open_panel(request: web.Request) -> web.Response:
        panels.open(await client_of(request))
        return web.Response()

    @server.routes.post(f"{ROUTES}/close")
    async def close_panel(request: web.Request) -> web.Response:
        panels.close(await client_of(request))
        return web.Response()
