"""Parallel Trace: shows the last run's timeline in figures, and saves it as a file for a trace viewer."""

from pathlib import Path

import folder_paths

from parallel_backend.client.registry import registry
from parallel_backend.client.reports.trace import nothing_has_run, read_trace, write_chrome_trace

from .ui.host import check_cancelled
from .ui.input_checks import short, validate
from .ui.widgets import ANY, CATEGORY, link, text


@validate()
class ParallelTrace:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "profile", "timeline")
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    FUNCTION = "trace"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Shows how long each GPU computed, waited and was idle in the last run, and how much transfer time was hidden "
        "behind computation. Saves the timeline for Perfetto and chrome://tracing."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "filename_prefix": text(
                    "parallel_dit_trace", "Name of the trace file in ComfyUI's output folder. A number is added to it."
                ),
            },
            "optional": {
                "after": link(ANY, "Any output of the sampler or of a node after it, so that this node runs after it.")
            },
        }

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")  # equal to nothing: the ranks may have run in each prompt

    def trace(self, filename_prefix, after=None):
        model = registry().present()
        if model is None:
            raise nothing_has_run()
        trace = read_trace(model, check_cancelled)
        try:
            folder, name, number, *_ = folder_paths.get_save_image_path(filename_prefix, folder_paths.get_output_directory())
            path = Path(folder) / f"{name}_{number:05}_.json"
            write_chrome_trace(trace, path)
        except Exception as error:  # as such ComfyUI raises it for a path outside of its output folder
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"filename_prefix: {short(filename_prefix)} cannot be written ({why}). Use another name."
            ) from error
        report = f"{trace}\n{path} opens in ui.perfetto.dev and chrome://tracing"
        return {"ui": {"text": [report]}, "result": (report,)}
