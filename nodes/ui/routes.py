"""Routes of ComfyUI's server for the scripts in web/js. Requests and answers are JSON."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .host import prompt_server


def add_route(method: str, path: str, answer: Callable[[bytes], Any]) -> None:
    """Have ComfyUI's server answer with `answer(body)`, or if that is a ValueError with {"error": its text} and status 400.

    To be called when ComfyUI imports the pack. Does nothing if nodes are run without ComfyUI's server.
    """
    if (server := prompt_server()) is None:
        return
    from aiohttp import web  # installed wherever ComfyUI runs as a server

    thread = ThreadPoolExecutor(1, f"parallel-dit {path}")  # of our own: ComfyUI serves its page on asyncio's threads

    @server.routes.route(method, path)
    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            return web.json_response(await asyncio.wrap_future(thread.submit(answer, body)))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)


def json_of(body: bytes, name: str, most: int) -> Any:
    """Return the value of a request's JSON. Raises ValueError, beginning with `name`, for more than `most` bytes, for text
    that is not JSON, and for JSON that is nested too deeply."""
    if len(body) > most:
        raise ValueError(f"{name}: the request has more than {most:,} bytes.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}: the request is not JSON.") from None
