"""Sends each rank its part of a micro-step or of a conditioning."""

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.residuals import AROUND
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.wire import messages as m

from .call import Conditioning, PostedStep
from .shared_residuals import SharedResiduals


class Scatter:
    """Cuts micro-steps by tokens and batch entries, conditionings by batch entries, and sends each rank its part.

    `cut`: how the tokens of a stage are cut over its sequence ranks. `shared`: the residuals of micro-steps under way, for
    ranks that share memory with this process.
    """

    def __init__(self, degrees: Degrees, cut: SequenceCut, ranks: ModelRanks):
        self._degrees, self.cut, self._ranks = degrees, cut, ranks
        self.shared = SharedResiduals(degrees, ranks)

    def step(self, replica: int, step: PostedStep) -> None:
        """Send a micro-step to the replica's ranks. All stages get latents and residuals."""
        call = step.assembly.call
        shards, entries, degrees = call.rows(self.cut), step.entries.slice, self._degrees
        # A ControlNet with few blocks uses one tensor for several blocks of the model: it is sent once.
        added = list({id(tensor): tensor for tensor in call.residuals.values()}.values())
        numbers = {id(tensor): number for number, tensor in enumerate(added)}
        of_all = {id(tensor) for name, tensor in call.residuals.items() if name.startswith(AROUND)}

        def rows(tensor: torch.Tensor, images: Span) -> Span:
            return Span(0, tensor.shape[1]) if id(tensor) in of_all else images

        # Ranks that need the same rows of a tensor share one copy.
        parts = {
            (id(tensor), rows(tensor, images)): tensor[entries, rows(tensor, images).slice]
            for images, _ in shards
            for tensor in added
        }
        placed = dict(zip(parts, self.shared.place(replica, step.seq, list(parts.values())), strict=True))
        messages = []
        for images, companion in shards:
            x = call.x[entries, images.slice]
            if len(companion):
                x = torch.cat((x, call.x[entries, companion.slice]), dim=1)
            message = m.Step(
                seq=step.seq,
                run=call.run,
                conditioning=call.conditioning.id,
                tokens=call.tokens,
                with_text=call.with_text,
                stale=call.stale,
                overlap=call.overlap,
                entries=step.local,
                timestep=call.timestep[entries],
                residuals={name: numbers[id(tensor)] for name, tensor in call.residuals.items()},
                added=tuple(placed[id(tensor), rows(tensor, images)] for tensor in added),
                x=x,
            )
            messages.append(message)
        with self._ranks.pool.together():
            for stage in range(degrees.pipe):
                for index, message in enumerate(messages):
                    for rank in degrees.ranks(replica, stage, index):
                        self._ranks.send(rank, message)

    def conditioning(self, conditioning: Conditioning) -> None:
        """Send a conditioning. All stages get all of it."""
        degrees, layout = self._degrees, conditioning.layout
        for replica, entries in enumerate(conditioning.shares(degrees.batch)):
            message = m.PutConditioning(
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
