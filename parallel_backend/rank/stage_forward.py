"""The forward of a rank's stage for one micro-step: from message and conditioning to the call of the model's class."""

import functools
from dataclasses import replace

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.own_class.built.built_class import StepInputs
from parallel_backend.rank.attention.context import AttentionStep
from parallel_backend.rank.attention.kv_buffer import KVBuffer
from parallel_backend.rank.attention.sparse import SparseStep
from parallel_backend.wire.sampling import Step

from .conditioning_store import RankConditioning
from .loaded_stage import LoadedStage
from .micro_step_graphs import MicroStepGraphs, MicroStepInputs, MicroStepState, Outputs


class StageForward:
    """Runs the forward of `stage`'s model."""

    def __init__(self, stage: LoadedStage, graphs: MicroStepGraphs | None = None):
        """`graphs`: of the micro-steps of `stage`; None: micro-steps are not captured."""
        self._stage, self._graphs = stage, graphs

    def compute(self, step: Step, conditioning: RankConditioning, buffer: KVBuffer | None) -> torch.Tensor:
        """[b, n, channels] on the last stage; elsewhere no tokens. What the next stage gets is on its way."""
        stage = self._stage
        inputs = MicroStepInputs(to_device(step.timestep, stage.device), to_device(step.x, stage.device, stage.dtype))
        stage.module_cache.begin_step(step, whole=conditioning.is_whole(step))
        state = MicroStepState(step, conditioning, stage.module_cache, buffer)
        forward = functools.partial(self._forward, state)
        try:
            # No graph where residuals are copied from the host, blocks wait for streamed weights, or a node has chosen a
            # kernel that is launched elsewhere: a graph has none of them. Nobody has captured a block-sparse kernel yet.
            kernel = stage.kernel_of(conditioning.changes.attention).kernel
            never = step.residuals or stage.store.streams or conditioning.changes.sparse is not None
            graphs = self._graphs if kernel.graphs and not never else None
            if graphs is not None:
                stage.own_link.given = known = stage.own_link.receive_known()
                inputs, graphs = (inputs, None) if known is None else (replace(inputs, received=known), graphs)
            output, *leaving = forward(inputs) if graphs is None else graphs.run(state, inputs, forward)
            stage.own_link.send_now(leaving)
            return output
        finally:
            stage.module_cache.end_step()

    def _forward(self, state: MicroStepState, inputs: MicroStepInputs) -> Outputs:
        """What `compute` returns, and what the next stage gets. It may be captured: all data on the host that it depends on
        is in `state`."""
        stage, step, conditioning = self._stage, state.step, state.conditioning
        token_order, image = conditioning.token_order, stage.cut.image(step.tokens)[stage.place]
        stage.attention.kernel = stage.kernel_of(conditioning.changes.attention)
        stage.attention.step = AttentionStep(
            entries=step.entries,
            buffer=state.buffer,
            stale=step.stale,
            overlap=step.overlap,
            residuals=self._residuals(step),
            guidance=conditioning.changes.guidance,
            sparse=self._sparse(state),
            kept=conditioning.kept[image],
            words=None if step.run or step.residuals else conditioning.words,
            words_have_run=not step.with_text,
        )
        stage.own_link.begin_forward(inputs.received)
        pictures = len(token_order.images(image))
        x, companion = inputs.x.tensor_split((pictures,), dim=1)
        step_inputs = StepInputs(
            x,
            companion,
            inputs.timestep,
            {name: tensor[step.entries.slice] for name, tensor in conditioning.tensors.items()},
            conditioning.grid,
            token_order,
            image,
            conditioning.kept[image],
            conditioning.companion_tokens,
        )
        try:
            with stage.blocks.skipping(conditioning.changes.skipped):
                out = stage.built.run(stage.blocks, step_inputs)
            # Companion tokens are replicated: the client takes them from one patch rank.
            out = out if stage.cut.gives_companion(stage.place) else out[:, :pictures]
            return (out, *stage.own_link.take_leaving())
        finally:
            stage.attention.step = None

    def _residuals(self, step: Step) -> dict[str, torch.Tensor]:
        """What a control adds for the rank's tokens, by the control's names."""
        # Always copies: the client reuses the shared memory once it has the micro-step's outputs, and other tensor ranks may
        # then still compute.
        added = [to_device(tensor, self._stage.device, self._stage.dtype, copy=True) for tensor in step.added]
        return {name: added[index] for name, index in step.residuals.items()}

    def _sparse(self, state: MicroStepState) -> SparseStep | None:
        """Block-sparse attention of the micro-step. None: it attends in full."""
        conditioning, stage = state.conditioning, self._stage
        settings = conditioning.changes.sparse
        if settings is None:
            return None
        stage.attention.sparse_calls.title = settings.title
        if lacks := stage.lacks_for_sparse(settings):
            stage.attention.sparse_calls.lacked.add(lacks)
            return None
        if state.buffer is not None or not conditioning.is_whole(state.step):
            stage.attention.sparse_calls.lacked.add("whole sequences, and bands have a part of the queries")
            return None
        kept = conditioning.kept[conditioning.token_order.span]
        if "sparse" not in kept:
            kept["sparse"] = SparseStep(settings, stage.device)
        return kept["sparse"]
