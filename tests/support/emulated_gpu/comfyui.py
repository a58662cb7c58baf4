"""The cards of processes.py, in a process in which ComfyUI's own device is the first of them.

ComfyUI asks for torch.device(torch.cuda.current_device()), and a CPU build of torch has no device of a plain number.
"""

import sys

import torch

from . import processes as processes
from .streams import here


def current_device() -> torch.device | int:
    """A device for ComfyUI, the number for all others, such as ranks that are forked from ComfyUI's process."""
    asks = sys._getframe(1).f_globals["__name__"]
    return torch.device("cuda", here.device) if asks.startswith("comfy.") else here.device


torch.cuda.current_device = current_device
