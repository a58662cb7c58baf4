"""What a trial has shown."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parallel_backend.core.own_class import OwnBlock, OwnLatent

NOT_TRIED = "it was not tried"


@dataclass(frozen=True)
class Proof:
    """What a trial has shown. An empty text: proven."""

    blocks: tuple[OwnBlock, ...]
    """All blocks of the model. Empty: none could be found."""
    stages: str
    """Why stages are not proven."""
    batch: str
    """Why entries of the batch on their own are not proven."""
    sequence: str
    """Why tokens cut over sequence ranks are not proven, by Ulysses or ring."""
    numbers: tuple[str, ...] = ()
    """Names of the call's numbers of which other values change nothing in this proof, such as a length of text."""
    options: tuple[str, ...] = ()
    """Tensors in ComfyUI's transformer_options that ranks have to get, such as the run's sigmas: the class reads one."""
    latent: OwnLatent | None = None
    """Where the latent's tokens are. None: bands are not proven."""
    bands: str = NOT_TRIED
    """Why bands are not proven."""
    tensor: str = NOT_TRIED
    """Why layers shared by tensor ranks are not proven, for the degree that was asked for."""

    def is_of_all(self, numbers: Collection[str]) -> bool:
        """Whether it holds for calls with any values of these numbers."""
        return set(numbers) <= set(self.numbers)


Tried = tuple[Proof, Sequence[OwnBlock], Sequence[OwnBlock] | str]
"""The proof, and the tried model's blocks: as they are, and with their tokens cut, or why they cannot be."""
