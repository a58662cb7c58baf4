"""Calls into ComfyUI for all nodes: its server and folders, the check for Cancel, refusals of functions that need
weights."""

import sys
from pathlib import Path
from typing import Any, NoReturn

import comfy.model_management
import folder_paths

from .other_nodes import calling_nodes, named


def prompt_server() -> Any:
    """ComfyUI's PromptServer. None: nodes are run from Python, without the server."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def check_cancelled() -> None:
    """Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def refuse(what: str, instead: str) -> NoReturn:
    """ValueError: `what` needs the weights, which only ranks have. `instead`: advice, a sentence."""
    raise ValueError(
        f"model: {what}{on_behalf()} is not possible, because Parallel DiT's weights are on its ranks. {instead}"
    )


def on_behalf() -> str:
    """Part of a refusal that names the node whose call it is. Empty if there is none."""
    nodes = named(calling_nodes())
    return f" (asked for by {nodes})" if nodes else ""


def folder() -> Path:
    """Folder for logs and for files that later starts read, such as calibrations. In ComfyUI's user directory: the temporary
    one is emptied at each start."""
    return Path(folder_paths.get_user_directory()) / "parallel_dit"


def log_folder() -> Path:
    """Folder for the ranks' logs."""
    return folder() / "logs"
