"""A line of text on the node that is being executed."""

from comfy_execution.utils import get_executing_context


def say(text: str) -> None:
    """Show a line of text on the node that is being executed."""
    context = get_executing_context()
    if context is None:  # nodes are run from Python, without the server
        return
    from server import PromptServer

    PromptServer.instance.send_progress_text(text, context.node_id)
