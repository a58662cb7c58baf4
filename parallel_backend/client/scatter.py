"""Sends each rank its part of a micro-step or of a conditioning."""

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.families.own_class.residuals import AROUND
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.wire import messages as m

from .call import Conditioning, PostedCall, PostedStep, Residuals
from .shared_residuals import SharedResiduals


class Scatter:
    """`stage_blocks`: the blocks of each stage. `cut`: the cut of a stage's tokens over its sequence ranks.

    `shared` has the residuals of micro-steps under way, for ranks that share memory with this process.
    """

    def __init__(
        self, checkpoint: Checkpoint, degrees: Degrees, stage_blocks: tuple[Span, ...], cut: SequenceCut, ranks: ModelRanks
    ):
        self._family, self._config = checkpoint.family, checkpoint.config
        self._degrees, self._stage_blocks, self.cut, self._ranks = degrees, stage_blocks, cut, ranks
        self.shared = SharedResiduals(degrees, ranks)

    def step(self, replica: int, step: PostedStep) -> None:
        """Send a micro-step to the replica's ranks: latents to the first stage, residuals to the stages of their blocks."""
        call = step.assembly.call
        shards = call.rows(self.cut)
        stages = [self._residuals(stage, call.residuals) for stage in range(self._degrees.pipe)]
        # A ControlNet with few blocks uses one tensor for several blocks of the model: it is sent once.
        added = [list({id(tensor): tensor for tensor in blocks.values()}.values()) for blocks in stages]
        entries, rows = step.entries.slice, self._rows_of_residuals(call, [images for images, _ in shards])
        of_all = {id(tensor) for name, tensor in call.residuals.items() if name.startswith(AROUND)}

        def rows_for(index: int, tensor: torch.Tensor) -> tuple[Span, ...]:
            return (Span(0, tensor.shape[1]),) if id(tensor) in of_all else rows[index]

        # Ranks that need the same rows of a tensor share one copy.
        parts = {
            (id(tensor), rows_for(index, tensor)): _joined(tensor[entries], rows_for(index, tensor))
            for tensors in added
            for index in range(len(rows))
            for tensor in tensors
        }
        placed = dict(zip(parts, self.shared.place(replica, step.seq, list(parts.values())), strict=True))
        messages: list[tuple[int, m.Step]] = []
        for stage, blocks in enumerate(stages):
            numbers = {id(tensor): number for number, tensor in enumerate(added[stage])}
            for index, (images, companion) in enumerate(shards):
                has_latent = stage == 0 or self._family.inputs.latent_everywhere
                x = call.x[entries, images.slice] if has_latent else None
                if x is not None and len(companion):
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
                    residuals={block: numbers[id(tensor)] for block, tensor in blocks.items()},
                    added=tuple(placed[id(tensor), rows_for(index, tensor)] for tensor in added[stage]),
                    x=x,
                    controlled=bool(call.residuals) and self._family.blocks.controlled,
                )
                messages += [(rank, message) for rank in self._degrees.ranks(replica, stage, index)]
        with self._ranks.pool.together():
            for rank, message in messages:
                self._ranks.send(rank, message)

    def _residuals(self, stage: int, residuals: Residuals) -> Residuals:
        """The residuals for the stage's blocks."""
        if not residuals or self._family.blocks.adds_residuals:
            return residuals
        owned = self._family.blocks.owned(self._config, self._stage_blocks[stage])
        places = {block: block.split(".") for block in residuals}
        return {block: residuals[block] for block, (name, index) in places.items() if int(index) in owned[name]}

    def _rows_of_residuals(self, call: PostedCall, images: list[Span]) -> list[tuple[Span, ...]]:
        """By sequence rank, the rows of a residual that it needs. `images`: the rank's image tokens."""
        if not self._family.blocks.controlled or not call.residuals:
            return [(part,) for part in images]
        picture, text = call.conditioning.token_order.image, call.conditioning.text_tokens
        assert call.with_text and call.tokens == call.conditioning.token_order.span
        return [(part, words.shift(picture)) for part, words in zip(images, self.cut.text(text), strict=True)]

    def conditioning(self, conditioning: Conditioning) -> None:
        """Send a conditioning: text tokens to the first stage, vectors that modulate blocks to all stages."""
        family, degrees, layout = self._family, self._degrees, conditioning.layout
        text_spans = [part.after(layout.companion_tokens) for part in self.cut.text(conditioning.text_tokens)]
        for replica, entries in enumerate(conditioning.shares(degrees.batch)):
            for stage in range(degrees.pipe):
                for index in range(degrees.sequence):
                    tensors = {}
                    for name, tensor in conditioning.tensors.items():
                        everywhere = family.inputs.is_everywhere(name)
                        if stage > 0 and not everywhere:
                            continue
                        whole = everywhere or family.whole_text
                        tensors[name] = tensor[entries.slice] if whole else tensor[entries.slice, text_spans[index].slice]
                    message = m.PutConditioning(
                        conditioning.id,
                        layout.grid,
                        conditioning.token_order.references,
                        conditioning.text_tokens,
                        len(entries),
                        tensors,
                        layout.along,
                        layout.companion_tokens,
                        conditioning.changes,
                    )
                    for rank in degrees.ranks(replica, stage, index):
                        self._ranks.send(rank, message)


def _joined(tensor: torch.Tensor, rows: tuple[Span, ...]) -> torch.Tensor:
    """These rows of [B, n, ...], in this order. A view if they are one span."""
    parts = [tensor[:, span.slice] for span in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
