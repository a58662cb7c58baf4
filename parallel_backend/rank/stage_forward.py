"""The forward of a rank's stage for one micro-step: from the message and the conditioning to the model's own arguments."""

import functools
import math
from collections.abc import Callable

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import class_order
from parallel_backend.families.base.blocks import PAIRED
from parallel_backend.families.base.step_inputs import GUIDANCE, REFERENCES, TEXT_MASK, Rows, StepInputs, kept_on
from parallel_backend.rank.attention.context import AttentionStep
from parallel_backend.rank.attention.frame_rows import FrameRows
from parallel_backend.rank.attention.kv_buffer import KVBuffer
from parallel_backend.rank.stage.block_slots import StageDone
from parallel_backend.rank.stage.build import keep_timestep_exact
from parallel_backend.wire.sampling import Step

from .conditioning_store import RankConditioning
from .loaded_stage import LoadedStage
from .micro_step_graphs import MicroStepGraphs, MicroStepInputs, MicroStepState


class StageForward:
    """Runs the forward of `stage`'s model."""

    def __init__(self, stage: LoadedStage, graphs: MicroStepGraphs | None = None):
        """`graphs`: of the micro-steps of `stage`; None: there are to be none."""
        self._stage, self._family, self._graphs = stage, stage.family, graphs
        self._timestep: torch.Tensor | None = None
        self._guidance: torch.Tensor | None = None
        self._paired = any(PAIRED in spec.attention.values() for spec in self._family.blocks.lists)
        keep_timestep_exact(stage.model, self._family, lambda: (self._timestep, self._guidance), stage.dtype)

    def received_shape(self, step: Step, conditioning: RankConditioning) -> tuple[int, ...]:
        """Shape of what the stage before sends for the micro-step, see StageIO.outgoing."""
        text, image = (shards[self._stage.place] for shards in self._shards(step, conditioning))
        tensors = 1 + len(self._stage.stage_io.arriving)
        return tensors * len(step.entries), len(text) + len(image), self._stage.hidden

    def compute(
        self, step: Step, conditioning: RankConditioning, buffer: KVBuffer | None, received: torch.Tensor | None
    ) -> torch.Tensor:
        """[b, n, channels] on the last stage; elsewhere what is sent on (StageIO.outgoing)."""
        stage = self._stage
        inputs = MicroStepInputs(
            to_device(step.timestep, stage.device),
            None if step.x is None else to_device(step.x, stage.device, stage.dtype),
            received,
        )
        stage.module_cache.begin_step(step, whole=conditioning.is_whole(step))
        state = MicroStepState(step, conditioning, stage.module_cache, buffer)
        forward = functools.partial(self._forward, state)
        try:
            # Residuals are copied from the host, and blocks of streamed weights wait for theirs.
            if self._graphs is None or step.residuals or stage.store.streams:
                return forward(inputs)
            return self._graphs.run(state, inputs, forward)
        finally:
            stage.module_cache.end_step()

    def _forward(self, state: MicroStepState, given: MicroStepInputs) -> torch.Tensor:
        """As `compute`. All of it is work of the device, and what it goes by on the host is in `state`."""
        stage, step, conditioning = self._stage, state.step, state.conditioning
        token_order = conditioning.token_order
        text, image = self._shards(step, conditioning)
        own_text, own_image = text[stage.place], image[stage.place]
        text_mask = conditioning.tensors.get(TEXT_MASK)
        stage.attention.step = AttentionStep(
            text_tokens=conditioning.text_tokens,
            text=text,
            image=image,
            entries=step.entries,
            buffer=state.buffer,
            stale=step.stale,
            overlap=step.overlap,
            text_first=self._family.blocks.text_first,
            text_mask_BT=None if text_mask is None else text_mask[step.entries.slice],
            image_padding=self._family.image_padding(conditioning.grid),
            frames=self._frame_rows(conditioning),
            guidance=conditioning.changes.guidance,
        )
        rows = self._rows(conditioning, own_image, own_text)
        stage.stage_io.begin_step(given.received, len(own_text), rows, self._residuals(step, conditioning, own_image))
        tensors = self._tensors(step, conditioning)
        self._guidance = tensors.get(GUIDANCE)
        x, companion = self._latents(given.x, tensors, conditioning, own_image)

        def read_timestep() -> torch.Tensor:
            state.read_on_host = True
            return step.timestep

        inputs = StepInputs(
            x,
            given.timestep,
            tensors,
            conditioning.grid,
            token_order,
            own_image,
            own_text,
            conditioning.text_tokens,
            stage.dtype,
            conditioning.kept[own_image],
            companion,
            conditioning.companion_tokens,
            read_timestep,
        )
        self._timestep, stage.stage_io.inputs = inputs.times, inputs
        try:
            with stage.skippable.skipping(conditioning.changes.skipped):
                out = self._family.run(stage.model, inputs)
            return out if stage.cut.gives_companion(stage.place) else out[:, : len(token_order.images(own_image))]
        except StageDone as done:
            return stage.stage_io.outgoing(done)
        finally:
            stage.attention.step = stage.attention.early_values = stage.stage_io.inputs = None

    def _shards(self, step: Step, conditioning: RankConditioning) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """The micro-step's text and image tokens by sequence rank."""
        cut = self._stage.cut
        return cut.text(conditioning.text_tokens if step.with_text else 0), cut.image(step.tokens)

    def _latents(
        self, x: torch.Tensor | None, tensors: dict[str, torch.Tensor], conditioning: RankConditioning, image: Span
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The rank's tokens of the picture, with those of references, and of the companion latent. See StepInputs."""
        if x is None:
            return None, None
        own = len(conditioning.token_order.images(image))
        return self._with_references(x[:, :own], tensors, conditioning, image), x[:, own:]

    def _with_references(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], conditioning: RankConditioning, image: Span
    ) -> torch.Tensor:
        """[b, m, C] of the picture's tokens -> [b, n, C] of `image`; as it is where the model is given whole tensors."""
        order = conditioning.token_order
        if self._family.forward.whole_latent or not order.references:
            return x
        dtype = torch.promote_types(x.dtype, tensors[REFERENCES].dtype)  # some families keep references exact
        out = x.new_empty(len(x), len(image), x.shape[-1], dtype=dtype)
        out[:, self._of_tokens(conditioning, image, "picture rows", order.picture_rows)] = x.to(dtype)
        rows = self._of_tokens(conditioning, image, "reference rows", order.reference_rows)
        own = self._of_tokens(conditioning, image, "their numbers", order.reference_numbers)
        out[:, rows] = tensors[REFERENCES][:, own].to(dtype)
        return out

    def _of_tokens(
        self, conditioning: RankConditioning, image: Span, name: str, make: Callable[[Span], torch.Tensor]
    ) -> torch.Tensor:
        """As StepInputs.of_tokens, before there are any."""
        return kept_on(self._stage.device, conditioning.kept[image], name, lambda: make(image))

    def _residuals(self, step: Step, conditioning: RankConditioning, image: Span) -> dict[str, torch.Tensor]:
        """Block -> [b, n, hidden]; what is added to reference tokens is zero."""
        if not step.residuals:
            return {}
        order = conditioning.token_order
        # Copies in any case: the client's memory is written to again once the micro-step's outputs are there, and a rank of
        # a tensor group may by then still be behind its last block.
        added = [to_device(tensor, self._stage.device, self._stage.dtype, copy=True) for tensor in step.added]
        if order.references:
            own = self._of_tokens(conditioning, image, "picture rows", order.picture_rows)
            for index, tensor in enumerate(added):
                added[index] = tensor.new_zeros(len(tensor), len(image), tensor.shape[-1])
                added[index][:, own] = tensor
        return {block: added[index] for block, index in step.residuals.items()}

    def _rows(self, conditioning: RankConditioning, image: Span, text: Span) -> Rows | None:
        """What slots cut whole tensors down to."""
        if not self._family.forward.whole_latent:
            return None
        order, kept = conditioning.token_order, conditioning.kept[image]
        if "rows" not in kept:
            same = not order.references and class_order(conditioning.grid, order.along) is None
            places = None if same else order.places_in_class(conditioning.grid, order.span)[image.slice]
            kept["rows"] = image.slice if places is None else to_device(places, self._stage.device)
        return Rows(kept["rows"], order.tokens, text, self._family.blocks.text_first)

    def _frame_rows(self, conditioning: RankConditioning) -> FrameRows | None:
        """Of the request's video, for layers that look at frames."""
        if not self._paired:
            return None
        grid, order = conditioning.grid, conditioning.token_order
        kept = conditioning.kept[order.span]
        if "frames" not in kept:
            kept["frames"] = order.places_in_class(grid, order.span) // math.prod(grid[1:])
        return FrameRows(kept["frames"], self._stage.device, kept)

    def _tensors(self, step: Step, conditioning: RankConditioning) -> dict[str, torch.Tensor]:
        """The conditioning of this micro-step's entries; its text is empty where the text does not run along.

        In families of `whole_text` it is whole all the same: what follows the prologue leaves it out.
        """
        tensors = {name: tensor[step.entries.slice] for name, tensor in conditioning.tensors.items()}
        if not step.with_text and not self._family.whole_text:
            for name in self._family.inputs.token_tensors:
                if name in tensors:
                    tensors[name] = tensors[name][:, :0]
        return tensors
