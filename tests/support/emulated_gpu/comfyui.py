"""The cards of processes.py, in a process in which ComfyUI's own device is the first of them.

ComfyUI asks for torch.device(torch.cuda.current_device()), and a CPU build of torch has no device of a plain number.
"""

import torch

from . import processes as processes
from .streams import here

torch.cuda.current_device = lambda: torch.device("cuda", here.device)
