"""The forward of a rank's stage for one micro-step: from message and conditioning to the call of the model's class."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.sparse_attention import SparseAttention
from parallel_backend.own_class.calls.call_arguments import (
    LATENT,
    LATENTS,
    OPTIONS,
    anew,
    from_tensors,
    pack,
    run_call,
    structure_of,
    timestep_of,
    unpack,
)
from parallel_backend.own_class.calls.patching import Patching
from parallel_backend.own_class.calls.residuals import CONTROL, by_kind
from parallel_backend.own_class.cuts.band_tokens import BandTokens, class_numbers
from parallel_backend.own_class.cuts.guided_attention import GUIDED
from parallel_backend.rank.attention.context import AttentionStep
from parallel_backend.rank.attention.kernel_choice import RankKernel
from parallel_backend.rank.attention.kv_buffer import KVBuffer
from parallel_backend.rank.attention.sparse import SparseStep
from parallel_backend.wire.sampling import Step

from .conditioning_store import RankConditioning
from .loaded_stage import LoadedStage
from .micro_step_graphs import MicroStepGraphs, MicroStepInputs, MicroStepState, Outputs


@dataclass(frozen=True)
class StepForm:
    """Values shared by all micro-steps of a conditioning with the same tokens and batch entries."""

    image: Span
    """The rank's image tokens, with those of references."""
    pictures: Span
    """The image's tokens among them, numbered without references."""
    arguments: Mapping[str, Any]
    """The call's arguments by name, without latent and timestep."""
    patching: Patching
    structure: Mapping[str, Any]
    """The decoded call_arguments.STRUCTURE."""
    sizes: tuple[int, ...]
    """(Frames,) rows and columns of the latent that the class gets."""
    band: BandTokens | None
    """None: no trial of bands was made for the class."""
    kernel: RankKernel
    is_whole: bool
    """Whether the rank has all tokens of the only latent."""


class StageForward:
    """Runs the forward of `stage`'s model."""

    def __init__(self, stage: LoadedStage, graphs: MicroStepGraphs | None = None):
        """`graphs`: CUDA graphs of the stage's micro-steps; None: micro-steps are not captured."""
        self._stage, self._graphs = stage, graphs

    def compute(self, step: Step, conditioning: RankConditioning, buffer: KVBuffer | None) -> torch.Tensor:
        """Return the output tokens [b, n, channels] on the last stage, a tensor without tokens on others. Starts sending to
        the next stage."""
        stage = self._stage
        inputs = MicroStepInputs(to_device(step.timestep, stage.device), to_device(step.x, stage.device, stage.dtype))
        stage.module_cache.begin_step(step, whole=conditioning.is_whole(step))
        state = MicroStepState(step, conditioning, stage.module_cache, buffer)
        try:
            if self._graphs is None or not self._can_be_captured(step, conditioning):
                output, *leaving = self._forward(state, inputs)
            else:
                output, *leaving = self._captured(state, inputs, self._graphs)
            stage.own_link.send_now(leaving)
            return output
        finally:
            stage.module_cache.end_step()

    def _can_be_captured(self, step: Step, conditioning: RankConditioning) -> bool:
        # No graph where residuals are copied from the host, blocks wait for streamed weights, or a node has chosen a
        # kernel that is launched elsewhere: a graph has none of them. Nobody has captured a block-sparse kernel yet.
        kernel = self._stage.kernel_of(conditioning.changes.attention).kernel
        return kernel.graphs and not (step.residuals or self._stage.store.streams or conditioning.changes.sparse is not None)

    def _captured(self, state: MicroStepState, inputs: MicroStepInputs, graphs: MicroStepGraphs) -> Outputs:
        """Return the result of `_forward`, from a CUDA graph if it is known what the stage receives."""
        link = self._stage.own_link
        link.given = known = link.receive_known()
        if known is None:
            return self._forward(state, inputs)
        return graphs.run(state, replace(inputs, received=known), functools.partial(self._forward, state))

    def _forward(self, state: MicroStepState, inputs: MicroStepInputs) -> Outputs:
        """Return (the result of `compute`, *tensors for the next stage). May be captured: `state` has all host data it
        depends on."""
        stage, step, conditioning = self._stage, state.step, state.conditioning
        form = self._form(conditioning, step)
        words = None if step.run or step.residuals else conditioning.words
        stage.attention.step = AttentionStep(
            message=step,
            kernel=form.kernel,
            buffer=state.buffer,
            residuals=self._residuals(step) if step.residuals else {},
            sparse=None if conditioning.changes.sparse is None else self._sparse(state, conditioning.changes.sparse),
            kept=conditioning.kept[form.image],
            known=conditioning.kept[form.image, step.run > 0, words is None, step.with_text],
            words=words,
        )
        stage.own_link.begin_forward(inputs.received)
        stage.blocks.skipped = conditioning.changes.skipped
        try:
            out = self._call(conditioning, form, inputs)
            # Companion tokens are replicated: the client takes them from one patch rank.
            out = out if stage.cut.gives_companion(stage.place) else out[:, : len(form.pictures)]
            return (out, *stage.own_link.take_leaving())
        finally:
            stage.attention.step = None

    def _call(self, conditioning: RankConditioning, form: StepForm, inputs: MicroStepInputs) -> torch.Tensor:
        """Call the class with the micro-step's inputs. Returns [b, m + a, c]: the m tokens of `form.pictures`, and the
        rank's a tokens of the companion. A stage that is not the last one returns no tokens."""
        stage, patching, structure = self._stage, form.patching, form.structure
        x = inputs.x if form.is_whole else self._among_all(inputs.x, conditioning, form)
        named = self._arguments(conditioning, form)
        timestep = timestep_of(inputs.timestep, structure)
        if not conditioning.companion_tokens:
            out = run_call(stage.blocks.call, patching.unpack(x, form.sizes), timestep, named)
            return x[:, :0] if out is None else patching.pack(out)[:, form.pictures.slice]
        shapes = [(len(x), *shape) for shape in structure[LATENTS]]
        out = run_call(stage.blocks.call, pack(patching.unpack_all(x, shapes), len(shapes[0])), timestep, named)
        if out is None:
            return x[:, :0]
        tokens = patching.pack_all(tuple(unpack(out, structure[LATENTS])))
        has_companion = inputs.x.shape[1] > len(form.pictures)
        companion = tokens[:, conditioning.token_order.image if has_companion else tokens.shape[1] :]
        return torch.cat((tokens[:, form.pictures.slice], companion), dim=1)

    def _among_all(self, own_x: torch.Tensor, conditioning: RankConditioning, form: StepForm) -> torch.Tensor:
        """Return the rank's tokens [b, m + a, c] among those of the whole latents [b, n, c]. Others are NaN: the prologue
        computes all tokens, and its results for other tokens are not used."""
        pictures, tokens = form.pictures, conditioning.token_order.image
        x = own_x.new_full((len(own_x), tokens + conditioning.companion_tokens, own_x.shape[-1]), math.nan)
        x[:, pictures.slice] = own_x[:, : len(pictures)]
        if own_x.shape[1] > len(pictures):
            x[:, tokens:] = own_x[:, len(pictures) :]
        return x

    def _form(self, conditioning: RankConditioning, step: Step) -> StepForm:
        """Return the form of a micro-step. It is cached, because the host has to wait for the device to read the
        structure."""
        key = step.tokens, step.entries
        if key not in conditioning.forms:
            conditioning.forms[key] = self._new_form(conditioning, step)
        return conditioning.forms[key]

    def _new_form(self, conditioning: RankConditioning, step: Step) -> StepForm:
        stage, latent, image = self._stage, self._stage.built.own.latent, self._stage.image(step.tokens)
        cut, order, grid = stage.blocks.tokens, conditioning.token_order, conditioning.grid
        tensors = {name: tensor[step.entries.slice] for name, tensor in conditioning.tensors.items()}
        patching, structure, band = stage.built.patching.cut(order.along), structure_of(conditioning.tensors), None
        arguments = {OPTIONS: {}} | from_tensors(tensors, structure)
        if cut is not None and latent is not None:
            numbers = class_numbers(order, grid)
            numbers = None if numbers is None else to_device(numbers, stage.device)
            ahead = latent.tokens_ahead(arguments)
            band = BandTokens(latent, order, image, numbers, conditioning.companion_tokens, ahead, cut.alone)
        # A naive patch has no row of another one with which the class could fill it up.
        sizes = () if cut is not None and cut.alone else structure[LATENT][1:]
        sizes = tuple(sizes or patching.whole(grid))
        pictures, kernel = order.images(image), stage.kernel_of(conditioning.changes.attention)
        is_whole = len(pictures) == order.image and not conditioning.companion_tokens
        return StepForm(image, pictures, arguments, patching, structure, sizes, band, kernel, is_whole)

    def _arguments(self, conditioning: RankConditioning, form: StepForm) -> dict[str, Any]:
        """Return the call's arguments by name, without latent and timestep. Also passes the call's band to the blocks."""
        blocks = self._stage.blocks
        named: dict[str, Any] = anew(form.arguments)
        if form.band is not None and blocks.tokens is not None:
            blocks.tokens.band = form.band
        if (guidance := conditioning.changes.guidance) is not None:
            named[OPTIONS][GUIDED] = guidance
        if residuals := blocks.residuals():
            named[CONTROL] = by_kind(residuals)
        return named

    def _residuals(self, step: Step) -> dict[str, torch.Tensor]:
        """Return residuals of a ControlNet for the rank's tokens, by the names of residuals.by_name."""
        # Always copies: the client reuses the shared memory once it has the micro-step's outputs, and other tensor ranks may
        # then still compute.
        added = [to_device(tensor, self._stage.device, self._stage.dtype, copy=True) for tensor in step.added]
        return {name: added[index] for name, index in step.residuals}

    def _sparse(self, state: MicroStepState, settings: SparseAttention) -> SparseStep | None:
        """Block-sparse attention of the micro-step. None: its attention is dense."""
        conditioning, stage = state.conditioning, self._stage
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
