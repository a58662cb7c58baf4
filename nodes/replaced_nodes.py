"""Finds nodes of this pack that another pack has replaced: ComfyUI silently gives an id to the pack that it loads last. Logs
a warning when ComfyUI starts. By `GET /parallel_dit/replaced` the page shows it and the menu refuses.
"""

import logging
import sys
from collections.abc import Mapping

from .ui.host import prompt_server

log = logging.getLogger(__name__)

ROUTE = "/parallel_dit/replaced"


def add_route(ours: Mapping[str, type]) -> None:
    """Add the route and the warning, when ComfyUI imports the pack. Does nothing if nodes are run without ComfyUI's server.
    `ours`: the pack's nodes, by id."""
    if (server := prompt_server()) is None:
        return
    from aiohttp import web  # installed wherever ComfyUI runs as a server

    known = sys.modules["nodes"].NODE_CLASS_MAPPINGS
    if theirs := strangers(ours, known):
        log.warning("Parallel DiT: these nodes replace another pack's (%s): %s. Remove one of the two packs.", *theirs)

    async def warn(_app: web.Application) -> None:
        if text := replaced(ours, known):
            log.warning("Parallel DiT: %s", text)

    server.app.on_startup.append(warn)  # all packs are loaded by then

    @server.routes.get(ROUTE)
    async def tell(_request: web.Request) -> web.Response:
        return web.json_response({"replaced": replaced(ours, known)})


def strangers(ours: Mapping[str, type], known: Mapping[str, type]) -> tuple[str, str] | None:
    """Names of other packs that have a node with an id of ours, and these ids. `known`: ComfyUI's nodes, by id."""
    found = {name: known[name] for name, own in ours.items() if known.get(name, own) is not own}
    packs = {getattr(each, "RELATIVE_PYTHON_MODULE", each.__module__) for each in found.values()}
    return (", ".join(sorted(packs)), ", ".join(sorted(found))) if found else None


def replaced(ours: Mapping[str, type], known: Mapping[str, type]) -> str:
    """A sentence that names the nodes that are another pack's. Empty if there are none."""
    if (theirs := strangers(ours, known)) is None:
        return ""
    packs, names = theirs
    return f"These nodes belong to another pack ({packs}), not Parallel DiT's: {names}. Remove one of the two packs."
