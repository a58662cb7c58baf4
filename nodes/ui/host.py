"""Calls into ComfyUI for all nodes: its server and folders, the check for Cancel, refusals of functions that need
weights."""

import sys
from pathlib import Path
from typing import Any, NoReturn

import comfy.model_management
import folder_paths

from .other_nodes import calling_nodes, named


def prompt_server() -> Any:
    """Return ComfyUI's PromptServer, or None if nodes are run from Python, without the server."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def check_cancelled() -> None:
    """Raise ComfyUI's InterruptProcessingException if the user has pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def refuse(what: str, instead: str) -> NoReturn:
    """Raise ValueError, because `what` needs the weights, which only ranks have. `instead`: a sentence with advice."""
    raise ValueError(
        f"model: {what}{on_behalf()} is not possible, because Parallel DiT's weights are on its ranks. {instead}"
    )


def on_behalf() -> str:
    """Return the part of an error text that names the node that made the call; empty if there is none."""
    nodes = named(calling_nodes())
    return f" (asked for by {nodes})" if nodes else ""


def folder() -> Path:
    """Return the folder for logs and for files that later starts read, such as calibrations. It is in ComfyUI's user
    directory, because the temporary one is emptied at each start."""
    return Path(folder_paths.get_user_directory()) / "parallel_dit"
