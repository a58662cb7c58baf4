"""Parses the JSON of a request to one of the pack's HTTP routes."""

import json
from typing import Any


def json_of(body: bytes, name: str, most: int) -> Any:
    """Return the value of a request's JSON. Raises ValueError, which begins with `name`, for more than `most` bytes, for
    text that is not JSON, and for JSON that is nested too deeply."""
    if len(body) > most:
        raise ValueError(f"{name}: the request has more than {most:,} bytes.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}: the request is not JSON.") from None
