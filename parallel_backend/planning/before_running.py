"""What can be said of a model on a machine before a run: whether the planner should be allowed PipeFusion."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_backend.placement.memory_model import USABLE_MEMORY


@dataclass(frozen=True)
class Cards:
    """The devices that `auto` means. `memory`: bytes of each. `peers`: all reach each other's memory directly (P2P)."""

    memory: Sequence[int]
    peers: bool

    def __len__(self) -> int:
        return len(self.memory)


def why_pipefusion(weights: int, cards: Cards) -> str:
    """Why exact modes alone would be slow for a model of so many bytes of weights, in words; empty if they would not be.

    Split batch, Ulysses and ring need the whole model on every card, and Ulysses, ring and tensor fast links. Where one of
    the two is not there PipeFusion is offered to the planner, which takes it if it is the fastest. Neither picture nor cfg
    is known yet.
    """
    if weights > USABLE_MEMORY * min(cards.memory):
        return "no card holds the whole model"
    if not cards.peers:
        return "the cards do not reach each other directly (P2P)"
    return ""
