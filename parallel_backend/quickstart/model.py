"""The bundled quickstart model, of 6.7 M parameters: its weights, its class as ranks build it, and that of a video model."""

import json
from pathlib import Path
from typing import Any

from parallel_backend.core.own_class import OwnClass

WEIGHTS = Path(__file__).with_name("quickstart-digits.safetensors")


def mini_flux(**arguments: Any) -> OwnClass:
    """Return the class of mini_flux.py without proofs. The bundled model needs no arguments."""
    return _own("mini_flux", "MiniFlux", arguments)


def mini_wan(**arguments: Any) -> OwnClass:
    """Return the class of mini_wan.py without proofs."""
    return _own("mini_wan", "MiniWan", arguments, video=True)


def _own(module: str, name: str, arguments: dict[str, Any], video: bool = False) -> OwnClass:
    return OwnClass(
        kind="",
        folder="",
        module=f"{__package__}.{module}",
        name=name,
        arguments=json.dumps(arguments),
        settings=(),
        imports=(),
        keys=(),
        halves=("bf16", "fp16"),
        video=video,
    )
