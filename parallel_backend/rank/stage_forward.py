"""The forward of a rank's stage for one micro-step: from the message and the conditioning to the model's own arguments."""

import math
from collections.abc import Callable

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder, class_order
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


class StageForward:
    """Runs the forward of `stage`'s model."""

    def __init__(self, stage: LoadedStage):
        self._stage, self._family = stage, stage.family
        self._timestep: torch.Tensor | None = None
        self._guidance: torch.Tensor | None = None
        # Of the last grid and token order: its places in the model's own order (Rows.image).
        self._orders: dict[tuple[tuple[int, ...], TokenOrder], torch.Tensor | None] = {}
        # Of the last grid and token order, for layers that look at frames.
        self._paired = any(PAIRED in spec.attention.values() for spec in self._family.blocks.lists)
        self._frames: dict[tuple[tuple[int, ...], TokenOrder], FrameRows] = {}
        keep_timestep_exact(stage.model, self._family, lambda: (self._timestep, self._guidance), stage.dtype)

    def received_shape(self, step: Step, conditioning: RankConditioning) -> tuple[int, ...]:
        """Shape of what the stage before sends for the micro-step, see StageIO.outgoing."""
        text, image = (shards[self._stage.place] for shards in self._shards(step, conditioning))
        tensors = 1 + len(self._stage.flow.arriving)
        return tensors * len(step.entries), len(text) + len(image), self._stage.hidden

    def compute(
        self, step: Step, conditioning: RankConditioning, buffer: KVBuffer | None, received: torch.Tensor | None
    ) -> torch.Tensor:
        """[b, n, channels] on the last stage; elsewhere what is sent on (StageIO.outgoing)."""
        stage, token_order = self._stage, conditioning.token_order
        text, image = self._shards(step, conditioning)
        own_text, own_image = text[stage.place], image[stage.place]
        text_mask = conditioning.tensors.get(TEXT_MASK)
        stage.attention.step = AttentionStep(
            text_tokens=conditioning.text_tokens,
            text=text,
            image=image,
            entries=step.entries,
            buffer=buffer,
            stale=step.stale,
            overlap=step.overlap,
            text_first=self._family.blocks.text_first,
            text_mask=None if text_mask is None else text_mask[step.entries.slice],
            image_padding=self._family.image_padding(conditioning.grid),
            row=token_order.row,
            frames=self._frame_rows(conditioning),
            guidance=conditioning.changes.guidance,
        )
        timestep = to_device(step.timestep, stage.device)
        rows = self._rows(conditioning, own_image, own_text)
        stage.flow.begin_step(received, len(own_text), rows, self._residuals(step, conditioning, own_image))
        tensors = self._tensors(step, conditioning)
        self._guidance = tensors.get(GUIDANCE)
        x, beside = self._latents(step, tensors, conditioning, own_image)
        inputs = StepInputs(
            x,
            timestep,
            tensors,
            conditioning.grid,
            token_order,
            own_image,
            own_text,
            conditioning.text_tokens,
            stage.dtype,
            conditioning.kept[own_image],
            beside,
            conditioning.beside,
            step.timestep,
        )
        self._timestep, stage.flow.inputs = inputs.times, inputs
        stage.module_cache.begin_step(step, whole=conditioning.is_whole(step))
        try:
            with stage.skippable.skipping(conditioning.changes.skipped):
                out = self._family.run(stage.model, inputs)
            return out if stage.cut.gives_beside(stage.place) else out[:, : len(token_order.images(own_image))]
        except StageDone as done:
            return stage.flow.outgoing(done)
        finally:
            stage.attention.step = stage.flow.inputs = None
            stage.module_cache.end_step()

    def _shards(self, step: Step, conditioning: RankConditioning) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """The micro-step's text and image tokens by sequence rank."""
        cut = self._stage.cut
        return cut.text(conditioning.text_tokens if step.with_text else 0), cut.image(step.tokens)

    def _latents(
        self, step: Step, tensors: dict[str, torch.Tensor], conditioning: RankConditioning, image: Span
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The rank's tokens of the picture, with those of references, and of the latent beside it. See StepInputs."""
        if step.x is None:
            return None, None
        own = len(conditioning.token_order.images(image))
        beside = to_device(step.x[:, own:], self._stage.device, self._stage.dtype)
        return self._with_references(step.x[:, :own], tensors, conditioning, image), beside

    def _with_references(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], conditioning: RankConditioning, image: Span
    ) -> torch.Tensor:
        """[b, m, C] of the picture's tokens -> [b, n, C] of `image`; as it is where the model is given whole tensors."""
        order = conditioning.token_order
        x = to_device(x, self._stage.device, self._stage.dtype)
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
        token_order, key = conditioning.token_order, (conditioning.grid, conditioning.token_order)
        if key not in self._orders:
            same = not token_order.references and class_order(conditioning.grid, token_order.along) is None
            places = None if same else token_order.places_in_class(conditioning.grid, token_order.span)
            self._orders = {key: None if places is None else to_device(places, self._stage.device)}
        order = self._orders[key]
        index = image.slice if order is None else order[image.slice]
        return Rows(index, token_order.tokens, text, self._family.blocks.text_first)

    def _frame_rows(self, conditioning: RankConditioning) -> FrameRows | None:
        """Of the request's video, for layers that look at frames."""
        if not self._paired:
            return None
        grid, order = conditioning.grid, conditioning.token_order
        if (grid, order) not in self._frames:
            frame = order.places_in_class(grid, order.span) // math.prod(grid[1:])
            self._frames = {(grid, order): FrameRows(frame, self._stage.device)}
        return self._frames[grid, order]

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
