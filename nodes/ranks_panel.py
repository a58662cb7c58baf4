"""The server's part of the sidebar's panel (web/js/ranks_panel.js), which asks once a second while it is open.

`GET /parallel_dit/ranks` answers {"pools": [see client/overview.py]}.
"""

from parallel_backend.client.registry import registry

from .ui.host import prompt_server


def add_ranks_route() -> None:
    """Add the route when ComfyUI imports the pack. Does nothing if nodes are run without ComfyUI's server."""
    if (server := prompt_server()) is None:
        return
    from aiohttp import web  # installed wherever ComfyUI runs as a server

    @server.routes.get("/parallel_dit/ranks")
    async def ranks(_request: web.Request) -> web.Response:
        return web.json_response({"pools": registry().overview()})
