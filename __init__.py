"""Parallel DiT: ComfyUI nodes that run one image's diffusion transformer across several GPUs."""

import sys
from pathlib import Path

if __package__:  # imported as a pack by ComfyUI; pytest may collect this file without one
    # Ranks are separate processes that import `parallel_backend` by its plain name, whatever the pack's folder is called.
    # At the end of the path `import nodes` still finds ComfyUI's module: the pack's package is imported as `.nodes` only.
    if (root := str(Path(__file__).parent)) not in sys.path:
        sys.path.append(root)
    from .host_version import check_backend, check_comfyui, check_diffusers, warn_of_folder

    check_comfyui()  # before imports that an older ComfyUI lacks
    check_diffusers()
    check_backend(Path(__file__).parent)
    warn_of_folder(Path(__file__).parent.name)
    from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    WEB_DIRECTORY = "web"  # help pages, one per node, which ComfyUI finds in its docs folder; a script for the menu
    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
