"""The conditioning that the ranks hold for a model: sent once, found again by its values."""

import itertools
from collections import deque

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.families.base.step_inputs import REFERENCES
from parallel_backend.processes.pool import Pool
from parallel_backend.wire.sampling import DropConditioning

from .call import Conditioning
from .not_finite import check_conditioning
from .scatter import Scatter

CONDITIONINGS_KEPT = 8
"""Conditionings that the ranks hold, and keep K/V buffers for: the newest."""


class ConditioningCache:
    """Not thread-safe: the client locks. `scatter` sends a conditioning to the ranks."""

    def __init__(self, checkpoint: Checkpoint, pool: Pool, scatter: Scatter):
        self._family, self._config = checkpoint.family, checkpoint.config
        self._pool, self._scatter = pool, scatter
        self._ids = itertools.count(1)
        self._held: deque[Conditioning] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def find(self, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], first_replica: int) -> Conditioning:
        """The ranks' own copy of these tensors, sent now if it is not there yet.

        A sampler passes the same values again at each step, in new tensors: they are compared, not identified.
        """
        for known in reversed(self._held):
            if known.first_replica == first_replica and known.matches(grid, tensors):
                return known
        check_conditioning(tensors)
        conditioning = self._make(grid, tensors, first_replica)
        self._scatter.conditioning(conditioning)
        self._held.append(conditioning)
        if len(self._held) > CONDITIONINGS_KEPT:
            self._pool.tell(DropConditioning(self._held.popleft().id))
        return conditioning

    def check_size(self, grid: tuple[int, ...]) -> None:
        """ValueError if the model has no positions for so large a grid."""
        side = self._family.sizes.max_side(self._config)
        if side is not None and max(grid[-2:]) > side:
            rows, columns = (size * self._family.patching.side for size in grid[-2:])
            limit = side * self._family.patching.side
            raise ValueError(
                f"latent_image: {columns} x {rows} is too large for this model, whose positions end at {limit} x {limit} "
                "latent pixels. Use a smaller latent."
            )

    def clear(self) -> None:
        """Forget all: the ranks hold them no more."""
        self._held.clear()

    def _make(self, grid: tuple[int, ...], tensors: dict[str, torch.Tensor], first_replica: int) -> Conditioning:
        family = self._family
        words = next((tensors[name].shape[1] for name in family.inputs.token_tensors if name in tensors), None)
        text = 0 if words is None else family.inputs.padded(words)
        return Conditioning(
            id=next(self._ids),
            grid=grid,
            token_order=family.token_order(grid, tensors[REFERENCES].shape[1] if REFERENCES in tensors else 0),
            text_tokens=family.image_padding(grid) + text,
            batch=len(next(iter(tensors.values()))),
            tensors={name: tensor.clone() for name, tensor in tensors.items()},  # the caller may write over its own
            first_replica=first_replica,
        )
