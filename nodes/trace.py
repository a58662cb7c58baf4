"""Parallel Trace: the last run's timeline as a picture, in figures, and as a file for a trace viewer."""

import os
from pathlib import Path

import folder_paths
import torch

from parallel_backend.client.registry import registry
from parallel_backend.client.reports.trace import nothing_has_run, read_trace, write_chrome_trace
from parallel_backend.client.reports.trace_picture import draw

from .ui.host import check_cancelled
from .ui.input_checks import short, validate
from .ui.other_nodes import COMFYUI
from .ui.widgets import ANY, CATEGORY, link, text, whole_number

LONGEST_NAME = 200
"""Characters of a file's name, to which a number and an ending are added."""


def check_name(filename_prefix: str | None) -> None:
    """ValueError for a text that no file can be named by. None: a text that comes over a link."""
    if filename_prefix is not None:
        check_prefix(filename_prefix, folder_paths.get_output_directory())


@validate(early=check_name)
class ParallelTrace:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "profile", "timeline")
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("IMAGE", "report")
    FUNCTION = "trace"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "The last run's timeline: when each GPU computed, waited and had nothing to do, and the share of transfer time that "
        "was hidden behind computing. Also saves it for chrome://tracing and Perfetto."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "width": whole_number(1600, 800, 4800, "The picture's width in pixels.", step=100),
                "filename_prefix": text(
                    "parallel_dit_trace", "Name of the trace file in ComfyUI's output folder, to which a number is added."
                ),
            },
            "optional": {
                "after": link(ANY, "Any output of the sampler or of a node behind it, so that this one runs after it.")
            },
        }

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")  # equal to nothing: the ranks may have run in each prompt

    def trace(self, width, filename_prefix, after=None):
        output = folder_paths.get_output_directory()
        check_prefix(filename_prefix, output)
        model = registry().present()
        if model is None:
            raise nothing_has_run()
        trace = read_trace(model, check_cancelled)
        image = torch.from_numpy(draw(trace, width)).float().div(255).unsqueeze(0)
        try:
            folder, name, number, *_ = folder_paths.get_save_image_path(filename_prefix, output, *image.shape[2:0:-1])
            path = Path(folder) / f"{name}_{number:05}_.json"
            write_chrome_trace(trace, path)
        except OSError as error:
            raise ValueError(
                f"filename_prefix: {short(filename_prefix)} cannot be written ({error.strerror}). Use another name."
            ) from error
        report = f"{trace}\n{path} opens in chrome://tracing and ui.perfetto.dev"
        ui = COMFYUI.PreviewImage().save_images(image)["ui"] | {"text": [report]}
        return {"ui": ui, "result": (image, report)}


def check_prefix(prefix: str, output: str) -> None:
    """ValueError for a text that no file can be named by, or that leads out of the folder `output`."""
    path = os.path.normpath(os.path.join(output, prefix))
    if not prefix.strip() or "\0" in prefix or len(os.path.basename(path)) > LONGEST_NAME:
        raise ValueError(f"filename_prefix: {short(prefix)} is no name for a file. Use one such as parallel_dit_trace.")
    if os.path.commonpath((os.path.normpath(output), path)) != os.path.normpath(output) or os.path.isabs(prefix):
        raise ValueError(f"filename_prefix: {short(prefix)} leads out of ComfyUI's output folder. Use a name inside it.")
