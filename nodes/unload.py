"""Unload Parallel DiT."""

from comfy.comfy_types import IO

from parallel_backend.client.registry import registry

from .ui.host import check_cancelled
from .ui.widgets import CATEGORY, link


class UnloadParallelDiT:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "free memory", "free vram", "unload model")
    RETURN_TYPES = (IO.ANY,)
    RETURN_NAMES = ("anything",)
    FUNCTION = "unload"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Frees the GPU memory that Parallel DiT uses: weights, LoRAs and buffers. The rank processes stay, so the next "
        "prompt only loads the weights again. ComfyUI's own button to unload models does the same."
    )

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = "Passed through. Put the node after a sampler to unload after sampling."
        return {"required": {}, "optional": {"anything": link(IO.ANY, tooltip)}}

    @classmethod
    def IS_CHANGED(cls, anything=None):
        return float("nan")  # equal to nothing: every prompt may have loaded weights again

    def unload(self, anything=None):
        registry().unload(poll=check_cancelled)
        return (anything,)
