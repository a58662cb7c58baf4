"""The conditionings that a model's ranks have. Each is sent once and recognized by its values."""

import itertools
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.wire.sampling import DropConditioning, PutConditioning

from .call import Conditioning, ModelCall, TokenLayout
from .not_finite import check_conditioning

CONDITIONINGS_KEPT = 8
"""Number of conditionings that the ranks keep, those used last, each with its K/V buffers. At most this number of calls with
different conditionings may be in progress."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A tensor of an earlier call, and its version then. torch increases the version at each write."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == tensor._version


def _seen_now(tensors: dict[str, torch.Tensor]) -> dict[str, Seen]:
    """Return the tensors that have a version. Those created in inference mode have none."""
    return {name: Seen(weakref.ref(each), each._version) for name, each in tensors.items() if not each.is_inference()}


class ConditioningCache:
    """Finds or sends the ranks' copy of a call's conditioning. Not thread-safe: Posting locks."""

    def __init__(self, checkpoint: Checkpoint, ranks: ModelRanks, degrees: Degrees):
        self._built, self._ranks, self._degrees = checkpoint.built, ranks, degrees
        self._ids = itertools.count(1)
        self._held: deque[Conditioning] = deque()
        self._seen: dict[int, dict[str, Seen]] = {}  # by conditioning, the tensors of its last call

    def __len__(self) -> int:
        return len(self._held)

    def find(self, call: ModelCall, layout: TokenLayout) -> Conditioning:
        """Return the ranks' copy of the call's conditioning. It is sent if the ranks do not have it.

        A sampler passes equal values at each step. New tensors are compared by value; tensors of the last call, as bands
        pass them (nodes/sampling/host_sampling.py), only by version.
        """
        first_replica = call.first_replica % self._degrees.batch
        held = [known for known in reversed(self._held) if known.first_replica == first_replica]
        unsure = {known.id: self._unsure(known, call.tensors) for known in held}
        for known in sorted(held, key=lambda known: len(unsure[known.id])):
            if known.matches(call, layout, unsure[known.id]):
                self._held.remove(known)
                break
        else:
            check_conditioning(call.tensors)
            known = self._make(call, layout, first_replica)
            self._send(known)
        self._held.append(known)
        self._seen[known.id] = _seen_now(call.tensors)
        if len(self._held) > CONDITIONINGS_KEPT:
            dropped = self._held.popleft().id
            del self._seen[dropped]
            self._ranks.tell(DropConditioning(dropped))
        return known

    def clear(self) -> None:
        """Forget all conditionings, because the ranks have freed them."""
        self._held.clear()
        self._seen.clear()

    def _unsure(self, known: Conditioning, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors whose values may differ from the conditioning's."""
        seen = self._seen[known.id]
        return [name for name, tensor in tensors.items() if name not in seen or not seen[name].is_still(tensor)]

    def _send(self, conditioning: Conditioning) -> None:
        """Send the conditioning to all ranks. Each replica gets its batch entries."""
        layout, degrees = conditioning.layout, self._degrees
        for replica, entries in enumerate(conditioning.shares(degrees.batch)):
            message = PutConditioning(
                id=conditioning.id,
                grid=layout.grid,
                references=conditioning.token_order.references,
                batch=len(entries),
                tensors={name: tensor[entries.slice] for name, tensor in conditioning.tensors.items()},
                along=layout.along,
                companion_tokens=layout.companion_tokens,
                changes=conditioning.changes,
            )
            for stage in range(degrees.pipe):
                for index in range(degrees.sequence):
                    for rank in degrees.ranks(replica, stage, index):
                        self._ranks.send(rank, message)

    def _make(self, call: ModelCall, layout: TokenLayout, first_replica: int) -> Conditioning:
        built, tensors = self._built, call.tensors
        text_tokens = built.text_tokens(layout.companion_tokens, tensors)
        references = built.counted(layout.grid, text_tokens, tensors).references
        return Conditioning(
            id=next(self._ids),
            layout=layout,
            token_order=built.token_order(layout.grid, references, layout.along),
            text_tokens=text_tokens,
            batch=len(next(iter(tensors.values()))),
            tensors={name: tensor.clone() for name, tensor in tensors.items()},  # the caller may overwrite its tensors
            first_replica=first_replica,
            changes=call.changes,
        )
