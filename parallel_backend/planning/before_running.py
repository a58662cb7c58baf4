"""Whether the planner may choose PipeFusion. This is decided before a run's image and cfg are known."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.placement.memory_model import USABLE_MEMORY


@dataclass(frozen=True)
class Cards:
    """The devices of the widget's `auto`. `memory`: bytes of each. `peers`: all reach each other's memory directly (P2P)."""

    memory: Sequence[int]
    peers: bool

    def __len__(self) -> int:
        return len(self.memory)


def why_pipefusion(weights: int, cards: Cards) -> str:
    """Why exact modes alone would be slow for a model with `weights` bytes of weights, as text; empty if they would not be.

    Split batch, Ulysses and ring need the whole model on every GPU. Ulysses, ring and tensor need fast links. If one of the
    two is missing, PipeFusion is offered to the planner, which takes it if it is the fastest.
    """
    if weights > USABLE_MEMORY * min(cards.memory):
        return "no GPU holds the whole model"
    if not cards.peers:
        return "the GPUs have no direct link (P2P)"
    return ""
