"""How a model is loaded onto ranks. A node creates it, it is the key of the model, and Load sends it to every rank."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from .degrees import Degrees
from .own_class import OwnBlock, OwnClass, OwnLatent


@dataclass(frozen=True)
class Offload:
    """The value of the widget `offload`."""

    streams: bool = True
    """Whether weights that do not fit on a device are streamed from host memory. False: a model that does not fit is
    refused."""
    leave_free: int = 0
    """Bytes of each device that stay free, as far as streaming weights makes that possible."""


ALLOWED = Offload()
"""The widget's `auto`."""


TensorSizes = tuple[tuple[str, tuple[int, ...]], ...]
"""(key in ComfyUI's layout, shape) of tensors."""


@dataclass(frozen=True)
class Setup:
    """All settings with which a model is loaded. Equal setups share one model on the ranks. The node checks devices and
    dtypes; Checkpoint.check_degrees checks the degrees."""

    path: Path
    """A file that exists on every rank's machine."""
    dtype: str
    """Dtype in which weights are stored and computed, see core/dtypes.py."""
    devices: tuple[str, ...]
    """`degrees.world` devices, by rank."""
    degrees: Degrees
    attention: str
    """The attention kernel, see core/attention_kernels.py."""
    stage_split: str = "auto"
    """Blocks of each pipeline stage, see placement.balance.check_stage_split."""
    compile: bool = False
    """Whether blocks are compiled by torch.compile, see rank/stage/compile.py."""
    transfer_dtype: str = "full"
    """Encoding of transfers between sequence ranks: one of degrees.TRANSFER_DTYPES."""
    offload: Offload = ALLOWED
    planned: str = ""
    """The settings from which the planner chose degrees and devices. Empty: the user chose them."""
    cuda_graphs: bool = False
    """Whether repeated micro-steps are replayed as CUDA graphs, see rank/micro_step_graphs.py."""
    enlarged: TensorSizes = ()
    """Tensors that a LoRA enlarges, such as Flux's first layer for a depth image in additional channels."""
    fp8_products: bool = False
    """Whether unscaled fp8 weights are multiplied in fp8, as ComfyUI does with `--fast fp8_matrix_mult`."""
    keep_run: bool = field(default=True, compare=False)
    """Whether a sampling run goes on with new ranks if its ranks are lost. It does not affect ranks."""
    own_class: OwnClass = field(kw_only=True)
    """The class that ranks build, ComfyUI's or quickstart's."""

    def with_blocks(self, blocks: tuple[OwnBlock, ...], latent: OwnLatent | None = None) -> "Setup":
        """Return the setup with the blocks of `own_class` and the places of its latent's tokens that a trial has found."""
        return replace(self, own_class=replace(self.own_class, blocks=blocks, latent=latent))

    def differs_by_plan_alone(self, other: "Setup") -> bool:
        """Whether the two differ only in settings that the planner chooses."""
        own = replace(other.own_class, blocks=(), latent=None)  # a trial for the plan finds them
        return replace(other, devices=self.devices, degrees=self.degrees, own_class=own) == self
