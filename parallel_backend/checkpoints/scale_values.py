"""Values of a quantised file's scales, read before its weights are loaded."""

import math

import torch

from parallel_backend.core.short_text import short

from .checkpoint import Checkpoint
from .quantised_formats import FLOATS
from .reader import reading

MOST_VALUES = 1 << 20
"""Most values of a scale that is looked at: of a whole weight, of rows or of columns. Scales by block may have a sixteenth
of the weight's values, and are not read twice."""


def check_scales(checkpoint: Checkpoint) -> None:
    """ValueError, naming the file and the scale, for a scale in float that is NaN or infinite.

    It would make a row, or all of a weight, NaN, and the search for NaN in a run would name the rank alone.
    """
    scales = {scale.key: scale for entry in checkpoint.entries.values() for scale in entry.scales.values()}
    with reading(checkpoint) as reader:
        for key, scale in scales.items():
            small = scale.dtype in FLOATS and math.prod(scale.shape) <= MOST_VALUES
            if small and not torch.isfinite(reader.tensor(scale)).all():
                raise ValueError(
                    f"model_name: {short(checkpoint.path.name)} has {short(key)}, a scale of weights, with values that "
                    "are NaN or infinite. The file is damaged, or its conversion failed. Use another copy."
                )
