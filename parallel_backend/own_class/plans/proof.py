"""The result of a trial."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parallel_backend.core.degrees import SEQUENCE_AXES, WIDGETS, Degrees
from parallel_backend.core.own_class import OwnBlock, OwnLatent

NOT_TRIED = "it was not tried"


@dataclass(frozen=True)
class Proof:
    """The result of a trial: what ranks can do with a class. A reason that is an empty string means that it is proven."""

    blocks: tuple[OwnBlock, ...]
    """All blocks of the model. Empty: no blocks were found."""
    stages: str
    """Why pipeline stages are not proven."""
    batch: str
    """Why computing entries of the batch separately is not proven."""
    sequence: str
    """Why cutting tokens over ranks, by Ulysses or ring, is not proven."""
    numbers: tuple[str, ...] = ()
    """Names of the call's numbers that may have other values in this proof, such as a length of text."""
    options: tuple[str, ...] = ()
    """Tensors in ComfyUI's transformer_options that the class reads, so that ranks must get them, such as the run's
    sigmas."""
    latent: OwnLatent | None = None
    """Where the latent's tokens are in the streams. None: bands are not proven."""
    bands: str = NOT_TRIED
    """Why bands are not proven."""
    tensor: str = NOT_TRIED
    """Why sharing layers between tensor-parallel ranks is not proven, for the degree that was asked for."""

    def check(self, degrees: Degrees, name: str) -> None:
        """Raise ValueError, which names the widget, if degrees of the model `name` are not proven. Bands are not a
        degree."""
        if degrees.pipe > 1 and self.stages:
            change = "Set pipefusion_degree to 1" if self.blocks else "Use ComfyUI's own loader, on one GPU"
            raise ValueError(f"{change}: {name} cannot be cut into stages: {self.stages}.")
        if degrees.sequence > 1 and self.sequence:
            widget = next(WIDGETS[axis] for axis in SEQUENCE_AXES if getattr(degrees, axis) > 1)
            raise ValueError(f"Set {widget} to 1: the tokens of {name} cannot be cut: {self.sequence}.")
        if degrees.naive and self.latent is None:
            raise ValueError(f"Set patch_degree to 1: {name} cannot run in naive patches: {self.bands}.")
        if degrees.tensor > 1 and self.blocks and self.tensor:
            raise ValueError(f"Set tensor_parallel_degree to 1: the layers of {name} cannot be shared out: {self.tensor}.")

    def is_of_all(self, numbers: Collection[str]) -> bool:
        """Return whether the proof is valid for calls with any values of these numbers."""
        return set(numbers) <= set(self.numbers)


Tried = tuple[Proof, Sequence[OwnBlock]]
"""The proof, and the blocks of the tried model, with the cuts of their tokens if they can be cut."""
