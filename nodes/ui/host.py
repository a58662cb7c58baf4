"""What the pack asks of ComfyUI while it works: Cancel, and how a node refuses."""

from typing import NoReturn

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension


def check_cancelled() -> None:
    """Raises ComfyUI's InterruptProcessingException once the user has pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(f"model: {what} is not possible with Parallel DiT's weights, which are on its ranks. {instead}")
