"""The result of a trial."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parallel_backend.core.degrees import SEQUENCE_AXES, WIDGETS, Degrees
from parallel_backend.core.own_class import OwnBlock, OwnLatent

NOT_TRIED = "it was not tried"


@dataclass(frozen=True)
class Proof:
    """The result of a trial. An empty text: proven."""

    blocks: tuple[OwnBlock, ...]
    """All blocks of the model. Empty: none could be found."""
    stages: str
    """Why stages are not proven."""
    batch: str
    """Why entries of the batch on their own are not proven."""
    sequence: str
    """Why tokens cut over sequence ranks are not proven, by Ulysses or ring."""
    numbers: tuple[str, ...] = ()
    """Names of the call's numbers that may have other values in this proof, such as a length of text."""
    options: tuple[str, ...] = ()
    """Tensors in ComfyUI's transformer_options that ranks must get, such as the run's sigmas: the class reads one."""
    latent: OwnLatent | None = None
    """Places of the latent's tokens. None: bands are not proven."""
    bands: str = NOT_TRIED
    """Why bands are not proven."""
    tensor: str = NOT_TRIED
    """Why layers shared by tensor ranks are not proven, for the degree that was asked for."""

    def check(self, degrees: Degrees, name: str) -> None:
        """ValueError, with the widget's name, for degrees of the model `name` that are not proven. Bands are not a
        degree."""
        if degrees.pipe > 1 and self.stages:
            raise ValueError(
                f"pipefusion_degree: {name} cannot be cut into stages: {self.stages}. "
                + ("Set it to 1." if self.blocks else "Load it with ComfyUI's own loader, on one GPU.")
            )
        if degrees.sequence > 1 and self.sequence:
            widget = next(WIDGETS[axis] for axis in SEQUENCE_AXES if getattr(degrees, axis) > 1)
            raise ValueError(f"{widget}: the tokens of {name} cannot be cut: {self.sequence}. Set it to 1.")
        if degrees.naive and self.latent is None:
            raise ValueError(f"patch_degree: {name} cannot run in naive patches: {self.bands}. Set it to 1.")
        if degrees.tensor > 1 and self.blocks and self.tensor:
            raise ValueError(
                f"tensor_parallel_degree: the layers of {name} cannot be shared out: {self.tensor}. Set it to 1."
            )

    def is_of_all(self, numbers: Collection[str]) -> bool:
        """Whether it holds for calls with any values of these numbers."""
        return set(numbers) <= set(self.numbers)


Tried = tuple[Proof, Sequence[OwnBlock]]
"""The proof, and the tried model's blocks, with the cut of their tokens if they can be cut."""
