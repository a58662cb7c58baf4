"""Which rank is sent which part of a call or of a conditioning."""

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.families.base.step_inputs import EVERYWHERE, REFERENCES
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.wire import messages as m

from .call import Conditioning, PostedStep, Residuals
from .shared_residuals import SharedResiduals


class Scatter:
    """`stage_blocks`: the blocks of each stage. `cut`: a stage's tokens over its sequence ranks.

    `shared`: has the residuals of micro-steps under way, where ranks share memory with this process.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        degrees: Degrees,
        stage_blocks: tuple[Span, ...],
        cut: SequenceCut,
        pool: ModelRanks,
        shared: SharedResiduals,
    ):
        self._family, self._config = checkpoint.family, checkpoint.config
        self._degrees, self._stage_blocks, self._cut = degrees, stage_blocks, cut
        self._pool, self._shared = pool, shared

    def step(self, replica: int, step: PostedStep) -> None:
        """Its part to every rank of the replica: the latent to the first stage, residuals to the stage of their blocks."""
        call = step.assembly.call
        shards = call.rows(self._cut)
        stages = [self._residuals(stage, call.residuals) for stage in range(self._degrees.pipe)]
        # A ControlNet with few blocks repeats its tensors: each is sent once.
        added = [list({id(tensor): tensor for tensor in blocks.values()}.values()) for blocks in stages]
        entries = step.entries.slice
        parts = [tensor[entries, images.slice] for tensors in added for images, _ in shards for tensor in tensors]
        placed = iter(self._shared.place(replica, step.seq, parts))
        messages: list[tuple[int, m.Step]] = []
        for stage, blocks in enumerate(stages):
            numbers = {id(tensor): number for number, tensor in enumerate(added[stage])}
            for index, (images, companion) in enumerate(shards):
                x = call.x[entries, images.slice] if stage == 0 else None
                if stage == 0 and len(companion):
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
                    added=tuple(next(placed) for _ in added[stage]),
                    x=x,
                )
                messages += [(rank, message) for rank in self._degrees.ranks(replica, stage, index)]
        with self._pool.together():
            for rank, message in messages:
                self._pool.send(rank, message)

    def _residuals(self, stage: int, residuals: Residuals) -> Residuals:
        """Those of the stage's own blocks."""
        if not residuals:
            return {}
        owned = self._family.blocks.owned(self._config, self._stage_blocks[stage])
        places = {block: block.split(".") for block in residuals}
        return {block: residuals[block] for block, (name, index) in places.items() if int(index) in owned[name]}

    def conditioning(self, conditioning: Conditioning) -> None:
        """To every rank what it needs of it: the text to the first stage, what modulates to all."""
        family, degrees = self._family, self._degrees
        text_spans = [own.after(conditioning.companion_tokens) for own in self._cut.text(conditioning.text_tokens)]
        for replica, entries in enumerate(conditioning.shares(degrees.batch)):
            for stage in range(degrees.pipe):
                for index in range(degrees.sequence):
                    tensors = {}
                    for name, tensor in conditioning.tensors.items():
                        everywhere = name in (*family.inputs.vector_tensors, *EVERYWHERE)
                        if stage > 0 and not everywhere:
                            continue
                        whole = everywhere or name == REFERENCES or family.whole_text
                        tensors[name] = tensor[entries.slice] if whole else tensor[entries.slice, text_spans[index].slice]
                    message = m.PutConditioning(
                        conditioning.id,
                        conditioning.grid,
                        conditioning.token_order.references,
                        conditioning.text_tokens,
                        len(entries),
                        tensors,
                        conditioning.token_order.along,
                        conditioning.companion_tokens,
                        conditioning.changes,
                    )
                    for rank in degrees.ranks(replica, stage, index):
                        self._pool.send(rank, message)
