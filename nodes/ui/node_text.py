"""Shows a line of text on the node that is being executed."""

from typing import Any

from comfy_execution.utils import get_executing_context

SAID = "parallel_dit.said"
"""Name of the event for web/js/node_text.js, which keeps the line after the run. Newer editors would remove it."""


def say(text: str) -> None:
    """Show a line of text on the node that is being executed."""
    context = get_executing_context()
    if context is None:  # nodes are run from Python, without the server
        return
    from server import PromptServer

    PromptServer.instance.send_progress_text(text, context.node_id)
    PromptServer.instance.send_sync(SAID, {"node": str(context.node_id), "text": text})


def show_report(report: str, verdict: str) -> dict[str, Any]:
    """Return the node's `ui` output, which web/js/reports.js shows in a read-only box on the node. Also shows the
    verdict."""
    say(f"Parallel DiT: {verdict}")
    return {"text": [report]}
