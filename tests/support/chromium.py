"""A Chromium of this machine, and settings with which ComfyUI's editor opens without what covers the graph."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTINGS = {
    "Comfy.TutorialCompleted": True,  # its dialog would cover the canvas
    "Comfy.Workflow.Persist": False,
    "Comfy.Minimap.Visible": False,
}


def find() -> str | None:
    """Its path, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)
