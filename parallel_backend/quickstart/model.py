"""The bundled quickstart model, of 6.7 M parameters: its weights, and its class as ranks build it."""

import json
from pathlib import Path
from typing import Any

from parallel_backend.core.own_class import OwnClass

WEIGHTS = Path(__file__).with_name("quickstart-digits.safetensors")


def mini_flux(**arguments: Any) -> OwnClass:
    """Return the class of mini_flux.py without proofs. The bundled model needs no arguments."""
    return OwnClass(
        kind="",
        folder="",
        module=f"{__package__}.mini_flux",
        name="MiniFlux",
        arguments=json.dumps(arguments),
        settings=(),
        imports=(),
        keys=(),
        halves=("bf16", "fp16"),
        video=False,
    )
