"""What a rank on a CPU imports of ComfyUI for its first class, imported once by the process that ranks are forked from.

PARALLEL_DIT_COMFYUI is ComfyUI's folder.
"""

import os

from parallel_backend.own_class.built.building import imported

SETTINGS = ("comfy.cli_args", "args.cpu", True), ("comfy.cli_args", "args.use_pytorch_cross_attention", True)
MODULES = "comfy.utils", "comfy.model_management", "comfy.ops", "comfy.ldm.modules.attention", "comfy.ldm.wan.model"

imported(os.environ["PARALLEL_DIT_COMFYUI"], "comfy.ldm.flux.model", "Flux", SETTINGS, MODULES)
