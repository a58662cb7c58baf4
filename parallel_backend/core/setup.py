"""How a model is put onto ranks: made once in a node, kept as the model's key, sent to every rank in Load."""

from dataclasses import dataclass, replace
from pathlib import Path

from .degrees import Degrees


@dataclass(frozen=True)
class Offload:
    """What the widget `offload` allows."""

    streams: bool = True
    """Weights that do not fit on a device are streamed from host memory. False: such a model is refused."""
    leave_free: int = 0
    """Bytes of each device that weights and runs are not to take, as far as streaming helps."""


ALLOWED = Offload()
"""The widget's `auto`."""


@dataclass(frozen=True)
class Setup:
    """Everything that a model is loaded with. Models of equal setups share the ranks and the weights on them.

    The values are checked where a user gave them: devices and dtypes by the node, degrees by Checkpoint.check_degrees.
    """

    path: Path
    """A single file, or a diffusers folder, on every rank's machine."""
    dtype: str
    """Of the weights and of the computing, see core/dtypes.py."""
    devices: tuple[str, ...]
    """By rank. Their number is `degrees.world`."""
    degrees: Degrees
    attention: str
    """The attention kernel, see core/attention_kernels.py."""
    stage_split: str = "auto"
    """Blocks of each pipeline stage, see placement.balance.check_stage_split."""
    compile: bool = False
    """Blocks are compiled, see rank/stage/compile.py."""
    transfer_dtype: str = "full"
    """What sequence ranks send each other: one of degrees.TRANSFER_DTYPES."""
    offload: Offload = ALLOWED
    """Whether weights may be streamed from host memory."""
    planned: str = ""
    """What the planner chose degrees and devices from. Empty: the user chose them."""
    cuda_graphs: bool = False
    """Micro-steps that come again are replayed as CUDA graphs, see rank/micro_step_graphs.py."""

    def differs_by_plan_alone(self, other: "Setup") -> bool:
        """The two are equal in all that the planner does not choose."""
        return replace(other, devices=self.devices, degrees=self.degrees) == self
