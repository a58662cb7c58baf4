"""Marks model calls that are a band of a PipeFusion run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel_backend.client.pipefusion.banded_run import BandedRun, NotLocal
from parallel_backend.own_class.calls.patching import Latents
from parallel_backend.processes.pool import Poll

from .run_shapes import PART, Shapes, is_for_all


class NotTried(NotLocal):
    """Raised if no trial was made for a band's call, such as a call that another node makes after the guider's. `prove`
    makes the trial for the whole latent. The run can then begin again."""

    def __init__(self, reason: str, prove: Callable[[], object]):
        super().__init__(reason)
        self.prove = prove


BAND_KEY = "parallel_dit_band"
"""Key in `transformer_options` under which a band's model calls carry a `Band`."""


@dataclass(frozen=True, eq=False)
class Band:
    """Marks a model call as band `index` of `run`, with the model of `stub`."""

    run: BandedRun
    index: int
    exact_above: float
    """Calls at sigmas above this one are exact."""
    stub: object
    """The RemoteDiffusionModel."""
    shapes: Shapes
    """Shapes of the band's latents."""
    wholes: Shapes
    """Shapes of the whole latents."""
    poll: Poll | None = None
    """Called while a call is waited for. In calls on ComfyUI's own thread it checks for Cancel."""
    apart: bool = False
    """Whether the calls are exact at any sigma, and leave the run's keys and values as they are."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Band":
        return self  # ComfyUI copies transformer_options for each model call: all must share one run

    def takes(self, stub: object, latents: Latents, options: dict[str, Any]) -> bool:
        """Whether a model call with these latents belongs to the run. Raises NotLocal if it does not and the run has several
        bands: a band's thread cannot make a call for the whole latent."""
        if stub is self.stub and is_for_all(latents, options, self.shapes):
            return True
        if len(self.run.rows) > 1:
            raise NotLocal(PART)
        self.run.note_exact()
        return False
