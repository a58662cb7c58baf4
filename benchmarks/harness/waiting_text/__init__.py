"""A custom node pack for benchmarks: a conditioning that takes as long as a text encoder, and no time of the CPU."""

import time
from typing import Any


class WaitingText:
    CATEGORY = "benchmarks"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",), "seconds": ("FLOAT", {"default": 0.0})}}

    def encode(self, conditioning: Any, seconds: float) -> tuple[Any]:
        time.sleep(seconds)
        return (conditioning,)


NODE_CLASS_MAPPINGS = {"WaitingText": WaitingText}
