"""Cancel, and how a node refuses."""

from typing import NoReturn

import comfy.model_management

from .other_nodes import calling_nodes, named


def check_cancelled() -> None:
    """Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def refuse(what: str, instead: str) -> NoReturn:
    """ValueError: `what` needs weights, which are on the ranks. `instead`: advice, a sentence."""
    raise ValueError(
        f"model: {what}{on_behalf()} is not possible with Parallel DiT's weights, which are on its ranks. {instead}"
    )


def on_behalf() -> str:
    """Words for a refusal: the node that asks for it. Empty if none does."""
    nodes = named(calling_nodes())
    return f" (asked for by {nodes})" if nodes else ""
