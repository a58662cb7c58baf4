"""The forward of a rank's stage for one micro-step: from message and conditioning to the arguments of the model's class."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import class_order
from parallel_backend.families.base.blocks import PAIRED
from parallel_backend.families.base.step_inputs import TEXT_ENDS, Rows, StepInputs
from parallel_backend.rank.attention.context import AttentionStep
from parallel_backend.rank.attention.kv_buffer import KVBuffer
from parallel_backend.rank.attention.prefix_keys import PrefixKeys
from parallel_backend.rank.attention.sparse import SparseStep
from parallel_backend.rank.attention.token_groups import TokenGroups, frames, windows
from parallel_backend.rank.stage.block_slots import Residual, StageDone
from parallel_backend.wire.sampling import Step

from .conditioning_store import RankConditioning
from .loaded_stage import LoadedStage
from .micro_step_graphs import MicroStepGraphs, MicroStepInputs, MicroStepState, Outputs


class StageForward:
    """Runs the forward of `stage`'s model."""

    def __init__(self, stage: LoadedStage, graphs: MicroStepGraphs | None = None):
        """`graphs`: of the micro-steps of `stage`; None: micro-steps are not captured."""
        self._stage, self._family, self._graphs = stage, stage.family, graphs
        self._paired = any(PAIRED in spec.attention.values() for spec in self._family.blocks.lists)

    def received_shape(self, step: Step, conditioning: RankConditioning) -> tuple[int, ...]:
        """Shape of the tensor that the previous stage sends for the micro-step, see StageIO.outgoing."""
        text, image = (shards[self._stage.place] for shards in self._shards(step, conditioning))
        return len(step.entries), len(text) + len(image), self._stage.hidden

    def compute(
        self, step: Step, conditioning: RankConditioning, buffer: KVBuffer | None, received: torch.Tensor | None
    ) -> torch.Tensor:
        """[b, n, channels] on the last stage; elsewhere the tensor for the next stage (StageIO.outgoing)."""
        stage = self._stage
        inputs = MicroStepInputs(
            to_device(step.timestep, stage.device),
            None if step.x is None else to_device(step.x, stage.device, stage.dtype),
            () if received is None else (received,),
        )
        stage.module_cache.begin_step(step, whole=conditioning.is_whole(step))
        state = MicroStepState(step, conditioning, stage.module_cache, buffer)
        forward = functools.partial(self._forward, state)
        try:
            # No graph where residuals are copied from the host, blocks wait for streamed weights, or a node has chosen a
            # kernel that is launched elsewhere: a graph has none of them. Nobody has captured a block-sparse kernel yet.
            # A graph would also put a controlled text's keys where those of the text itself are kept, and a packed text's
            # keys are new tensors in each call.
            kernel = stage.kernel_of(conditioning.changes.attention).kernel
            sparse = conditioning.changes.sparse is not None
            other_text = step.controlled or bool(conditioning.changes.kept_text)
            added = bool(step.residuals) or other_text
            graphs = self._graphs if not (added or stage.store.streams or sparse) and kernel.graphs else None
            if graphs is not None and stage.own_link is not None:
                stage.own_link.given = known = stage.own_link.receive_known()
                inputs, graphs = (inputs, None) if known is None else (replace(inputs, received=known), graphs)
            output, *leaving = forward(inputs) if graphs is None else graphs.run(state, inputs, forward)
            if stage.own_link is not None:
                stage.own_link.send_now(leaving)
            return output
        finally:
            stage.module_cache.end_step()

    def _forward(self, state: MicroStepState, inputs: MicroStepInputs) -> Outputs:
        """What `compute` returns, and what ComfyUI's own class sends to the next stage. It may be captured: all data on the
        host that it depends on is in `state`."""
        stage, step, conditioning = self._stage, state.step, state.conditioning
        token_order = conditioning.token_order
        text, image = self._shards(step, conditioning)
        text_span, image_span = text[stage.place], image[stage.place]
        text_ends = conditioning.tensors.get(TEXT_ENDS)
        stage.attention.kernel = stage.kernel_of(conditioning.changes.attention)
        stage.attention.step = AttentionStep(
            text_tokens=conditioning.text_tokens,
            text=text,
            image=image,
            entries=step.entries,
            buffer=state.buffer,
            stale=step.stale,
            overlap=step.overlap,
            text_first=self._family.blocks.text_first,
            prefix=PrefixKeys(conditioning.batch) if state.buffer is not None or step.controlled else conditioning.prefix,
            text_ends_T=None if text_ends is None else text_ends[0],
            text_runs=conditioning.text_runs,
            frames=self._frames(conditioning),
            windows=self._windows(conditioning),
            guidance=conditioning.changes.guidance,
            sparse=self._sparse(state),
            kept=conditioning.kept[image_span],
        )
        rows = self._rows(conditioning, image_span)
        residuals = self._residuals(step, len(text_span))
        if stage.own_link is not None:
            stage.own_link.begin_forward(inputs.received)
        stage.stage_io.begin_step(next(iter(inputs.received), None), len(text_span), rows, residuals)
        tensors = self._tensors(step, conditioning)
        x = inputs.x
        companion = None
        if x is not None:
            x, companion = x.tensor_split((len(token_order.images(image_span)),), dim=1)
        step_inputs = StepInputs(
            x,
            inputs.timestep,
            tensors,
            conditioning.grid,
            token_order,
            image_span,
            text_span,
            conditioning.text_tokens,
            stage.dtype,
            conditioning.kept[image_span],
            companion,
            conditioning.companion_tokens,
        )
        try:
            with stage.skippable.skipping(conditioning.changes.skipped):
                out = self._family.run(stage.model, step_inputs)
            # Companion tokens are replicated: the client takes them from one patch rank.
            out = out if stage.cut.gives_companion(stage.place) else out[:, : len(token_order.images(image_span))]
            return (out,) if stage.own_link is None else (out, *stage.own_link.take_leaving())
        except StageDone as done:
            return (stage.stage_io.outgoing(done),)
        finally:
            stage.attention.step = stage.attention.early_values = None

    def _shards(self, step: Step, conditioning: RankConditioning) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """The micro-step's text and image tokens by sequence rank."""
        cut = self._stage.cut
        return cut.text(conditioning.text_tokens if step.with_text else 0), cut.image(step.tokens)

    def _residuals(self, step: Step, text_tokens: int) -> dict[str, Residual]:
        """By block, what is added to its output for the rank's tokens."""
        if not step.residuals:
            return {}
        # Always copies: the client reuses the shared memory once it has the micro-step's outputs, and other tensor ranks may
        # then still compute.
        added = [to_device(tensor, self._stage.device, self._stage.dtype, copy=True) for tensor in step.added]
        residuals: list[Residual] = []
        for tensor in added:
            parts = tensor.tensor_split((tensor.shape[1] - text_tokens,), dim=1) if step.controlled else (tensor,)
            residuals.append(Residual(*parts))
        return {block: residuals[index] for block, index in step.residuals.items()}

    def _rows(self, conditioning: RankConditioning, image: Span) -> Rows | None:
        """The rank's rows of whole tensors, for block slots. None for models that take packed tokens."""
        if not self._family.forward.whole_latent:
            return None
        order, kept = conditioning.token_order, conditioning.kept[image]
        if "rows" not in kept:
            # A slice is a view and an index tensor a copy, so a slice where the class has the tokens in the same order.
            same = class_order(conditioning.grid, order.along) is None
            places = None if same else order.places_in_class(conditioning.grid, order.span)[image.slice]
            kept["rows"] = image.slice if places is None else to_device(places, self._stage.device)
        return Rows(kept["rows"], order.tokens)

    def _frames(self, conditioning: RankConditioning) -> TokenGroups | None:
        """Frames of the video's tokens, for layers that attend by frame."""
        return self._groups(conditioning, "frames", lambda: frames(conditioning.grid)) if self._paired else None

    def _windows(self, conditioning: RankConditioning) -> tuple[TokenGroups, ...]:
        """Windows of the video's tokens, for layers that attend in windows."""
        if (cuts := self._family.blocks.windows) is None:
            return ()
        grid = conditioning.grid
        return tuple(
            self._groups(conditioning, f"windows {number}", functools.partial(windows, grid, spans))
            for number, spans in enumerate(cuts(grid))
        )

    def _groups(self, conditioning: RankConditioning, name: str, make: Callable[[], torch.Tensor]) -> TokenGroups:
        """`make`: the group of each token in the class's order."""
        order = conditioning.token_order
        kept = conditioning.kept[order.span]
        if name not in kept:
            kept[name] = make()[order.places_in_class(conditioning.grid, order.span)]
        return TokenGroups(name, kept[name], self._stage.device, kept)

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
        if stage.own_link is None:
            stage.attention.sparse_calls.lacked.add("a model that runs as ComfyUI's own class")
            return None
        kept = conditioning.kept[conditioning.token_order.span]
        if "sparse" not in kept:
            kept["sparse"] = SparseStep(settings, stage.device)
        return kept["sparse"]

    def _tensors(self, step: Step, conditioning: RankConditioning) -> dict[str, torch.Tensor]:
        """The conditioning of this micro-step's entries, with empty text if the micro-step does not compute text.

        In families of `whole_text` the prologue always gets the whole text; later blocks leave it out.
        """
        tensors = {name: tensor[step.entries.slice] for name, tensor in conditioning.tensors.items()}
        if not step.with_text and not self._family.whole_text:
            for name in self._family.inputs.token_tensors:
                if name in tensors:
                    tensors[name] = tensors[name][:, :0]
        return tensors
