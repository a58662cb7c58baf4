"""The conditioning that the ranks hold for a model: sent once, found again by its values."""

import itertools
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.families.base.step_inputs import REFERENCES
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.wire.sampling import DropConditioning

from .call import Conditioning
from .not_finite import check_conditioning
from .scatter import Scatter

CONDITIONINGS_KEPT = 8
"""Conditionings that the ranks hold, and keep K/V buffers for: the newest."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A tensor that was given before, and how often it had been written to then."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == tensor._version


def _seen_now(tensors: dict[str, torch.Tensor]) -> dict[str, Seen]:
    """Those that count how often they are written to; tensors made in inference mode do not."""
    return {name: Seen(weakref.ref(each), each._version) for name, each in tensors.items() if not each.is_inference()}


class ConditioningCache:
    """Not thread-safe: the client locks. `scatter` sends a conditioning to the ranks."""

    def __init__(self, checkpoint: Checkpoint, pool: ModelRanks, scatter: Scatter):
        self._family, self._config = checkpoint.family, checkpoint.config
        self._pool, self._scatter = pool, scatter
        self._ids = itertools.count(1)
        self._held: deque[Conditioning] = deque()
        self._seen: dict[int, dict[str, Seen]] = {}  # by conditioning, its tensors as they were last given

    def __len__(self) -> int:
        return len(self._held)

    def find(
        self,
        grid: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
        first_replica: int,
        along: str = "rows",
        companion_tokens: int = 0,
        changes: BlockChanges = UNCHANGED,
    ) -> Conditioning:
        """The ranks' own copy of these tensors, sent now if it is not there yet.

        `companion_tokens`, `changes`: see Conditioning.

        A sampler passes the same values again at each step, mostly in new tensors: those are compared. Bands pass the same
        tensors (nodes/sampling/host_sampling.py), which are known if nobody has written to them since.
        """
        held = [known for known in reversed(self._held) if known.first_replica == first_replica]
        unsure = {known.id: self._unsure(known, tensors) for known in held}
        for known in sorted(held, key=lambda known: len(unsure[known.id])):
            if known.matches(grid, tensors, unsure[known.id], along, companion_tokens, changes):
                self._seen[known.id] = _seen_now(tensors)
                return known
        check_conditioning(tensors)
        conditioning = self._make(grid, tensors, first_replica, along, companion_tokens, changes)
        self._scatter.conditioning(conditioning)
        self._held.append(conditioning)
        self._seen[conditioning.id] = _seen_now(tensors)
        if len(self._held) > CONDITIONINGS_KEPT:
            dropped = self._held.popleft().id
            del self._seen[dropped]
            self._pool.tell(DropConditioning(dropped))
        return conditioning

    def check_size(self, grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
        """ValueError if the model has no positions for this grid, makes fewer frames, or `tensors` are for another one."""
        frames = self._family.sizes.max_frames
        if frames is not None and grid[0] > frames:
            raise ValueError(
                f"latent_image: the latent has {grid[0]} frames, this model makes {frames}. Use its own Empty Latent node."
            )
        side = self._family.sizes.max_side(self._config)
        if side is not None and max(grid[-2:]) > side:
            rows, columns = (size * self._family.patching.side for size in grid[-2:])
            limit = side * self._family.patching.side
            raise ValueError(
                f"latent_image: {columns} x {rows} is too large for this model, whose positions end at {limit} x {limit} "
                "latent pixels. Use a smaller latent."
            )
        self._family.inputs.check_grid(grid, tensors)

    def clear(self) -> None:
        """Forget all: the ranks hold them no more."""
        self._held.clear()
        self._seen.clear()

    def _unsure(self, known: Conditioning, tensors: dict[str, torch.Tensor]) -> list[str]:
        """The names of those that may have other values than the conditioning's."""
        seen = self._seen[known.id]
        return [name for name, tensor in tensors.items() if name not in seen or not seen[name].is_still(tensor)]

    def _make(
        self,
        grid: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
        first_replica: int,
        along: str,
        companion_tokens: int,
        changes: BlockChanges,
    ) -> Conditioning:
        family = self._family
        references = tensors[REFERENCES].shape[1] if REFERENCES in tensors else 0
        return Conditioning(
            id=next(self._ids),
            grid=grid,
            token_order=family.token_order(grid, references, along),
            text_tokens=family.text_tokens(grid, companion_tokens, tensors),
            batch=len(next(iter(tensors.values()))),
            tensors={name: tensor.clone() for name, tensor in tensors.items()},  # the caller may write over its own
            first_replica=first_replica,
            companion_tokens=companion_tokens,
            changes=changes,
        )
