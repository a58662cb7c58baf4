"""Shows a line of text on the node that is being executed."""

import logging
from typing import Any

from comfy_execution.utils import get_executing_context

log = logging.getLogger(__name__)

SAID = "parallel_dit.said"
"""Name of the event for web/js/node_text.js, which keeps the line after the run. Newer editors would remove it."""


def say(text: str) -> None:
    """Show a line of text on the node that is being executed, on the page that has queued the prompt."""
    context = get_executing_context()
    if context is None:  # nodes are run from Python, without the server
        return
    from server import PromptServer

    server = PromptServer.instance
    if server.client_id is None:  # queued without a page; other pages may have a node with this id
        return
    server.send_progress_text(text, context.node_id, server.client_id)
    server.send_sync(SAID, {"node": str(context.node_id), "text": text}, server.client_id)


def tell(text: str, why: str = "") -> None:
    """Show a line on the node and in the console. `why`: for the console alone."""
    log.warning("Parallel DiT: %s%s", text, f" ({why})" if why else "")
    say(f"Parallel DiT: {text}")


def show_report(report: str, verdict: str) -> dict[str, Any]:
    """Return the node's `ui` output, which web/js/reports.js shows in a read-only box on the node. Also shows the
    verdict."""
    say(f"Parallel DiT: {verdict}")
    return {"text": [report]}
