"""Polls of a client that waits for ranks."""


class Cancelled(BaseException):
    """As ComfyUI's InterruptProcessingException, which is not an Exception in recent versions."""


def nothing() -> None:
    """Never gives up."""
