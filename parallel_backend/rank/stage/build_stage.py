"""Builds a pipeline stage of ComfyUI's own class (own_class/). Every stage has the class's prologue and epilogue."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.own_class import OwnBlock
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.built.built_class import BuiltClass
from parallel_backend.own_class.calls.call_arguments import OPTIONS, from_tensors, run_call, structure_of, timestep_of
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.shared_outputs import put_idle_modules
from parallel_backend.own_class.cuts.stages import StageBlocks, Wanted, pass_through
from parallel_backend.own_class.cuts.tensor_plan import divide
from parallel_backend.rank.attention.context import AttentionContext
from parallel_backend.rank.attention.local import StageAttention
from parallel_backend.rank.attention.rank_tokens import RankTokens
from parallel_backend.rank.comm.collectives import all_reduce
from parallel_backend.rank.comm.stage_link import StageLink
from parallel_backend.wire.diagnosis import OwnCall
from parallel_backend.wire.sampling import Step

from .tensor_parallel import TensorPlan
from .weights import StageWeights

OTHER_SHAPES = "a stage receives different shapes from those of an earlier call with the same key"


@dataclass(frozen=True)
class Stage:
    """A stage's model, with its weights in place."""

    model: nn.Module
    blocks: StageBlocks
    plan: TensorPlan
    """The tensor plan of the stage's blocks."""
    modules: dict[str, nn.Module]
    """Name -> block, for the stage's blocks in the order in which they run."""


class OwnLink:
    """Implements own_class.cuts.stages.Link over the pipe axis.

    Only the class's forward can tell the shapes that a micro-step receives, so early receives are posted only if a similar
    micro-step ran before. Tensors are sent after the forward, because a CUDA graph of the forward has no transfers.
    """

    def __init__(self, link: StageLink, receives_early: bool):
        self._link, self._receives_early = link, receives_early
        self._step: Step | None = None
        self._upcoming: Step | None = None
        self._known: dict[tuple[int, Span, Span, bool], list[Wanted]] = {}  # by Step.form
        self._posted: list[Wanted] = []  # for the next micro-step
        self.given: tuple[torch.Tensor, ...] | None = None
        """Tensors received before the forward. None: the forward receives them itself."""
        self._leaving: list[torch.Tensor] = []

    def begin_step(self, step: Step, upcoming: Step | None) -> None:
        """Begin a micro-step. `upcoming`: the next one, if known."""
        self._step, self._upcoming, self.given = step, upcoming, None

    def drop_conditioning(self, conditioning: int) -> None:
        """Forget the shapes for a conditioning, because its next calls will have other arguments."""
        self._known = {form: wanted for form, wanted in self._known.items() if form[0] != conditioning}

    def receive_known(self) -> tuple[torch.Tensor, ...] | None:
        """Receive the tensors that the forward will read. None if there was no similar micro-step."""
        assert self._step is not None
        if self._link.before is None:
            return ()
        known = self._known.get(self._step.form)
        return None if known is None else tuple(self._received(known))

    def begin_forward(self, received: tuple[torch.Tensor, ...]) -> None:
        """Begin the forward, perhaps for the second time. `received`: the tensors from receive_known, or a copy of them."""
        self._leaving.clear()
        if self.given is not None:
            self.given = received

    def receive(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        if self.given is None:
            return self._received(wanted)
        if [(each.shape, each.dtype) for each in self.given] != list(wanted):
            raise Unproven(OTHER_SHAPES)
        return list(self.given)

    def _received(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        assert self._step is not None
        posted, self._posted = self._posted or self._post(wanted), []
        if posted != wanted:
            raise Unproven(OTHER_SHAPES)
        received = [self._link.receive() for _ in wanted]
        self._known[self._step.form] = posted
        # Behind the receives of this micro-step: both ends pair transfers by their order.
        if self._receives_early and self._step.overlap and self._upcoming is not None:
            self._posted = self._post(self._known.get(self._upcoming.form, ()))
        return received

    def _post(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        for shape, dtype in wanted:
            self._link.post_receive(shape, dtype)
        return list(wanted)

    def send(self, tensor: torch.Tensor) -> None:
        self._leaving.append(tensor)

    def take_leaving(self) -> list[torch.Tensor]:
        """Return the tensors that the forward has passed to `send`. They are not sent yet."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def send_now(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start sending these tensors to the next stage."""
        assert self._step is not None
        for tensor in tensors:
            self._link.send(tensor, self._step.overlap)


def attend_over_ranks(stage: Stage, context: AttentionContext, ranks: SequenceCut | None, gate: str = "") -> StageAttention:
    """Return the stage's attention, which its blocks use from now on.

    `ranks`: the cut by which blocks compute this rank's tokens only, and in a run of bands those of the band. None: all
    tokens. `gate`: adapters.Adapter.gate, empty if there is none.
    """
    blocks = stage.blocks
    attention = StageAttention(context, lambda: blocks.running)
    blocks.attend = attention.attend
    blocks.residuals = lambda: {} if attention.step is None else attention.step.residuals
    if context.tensor.size > 1:  # a token's norm is over the channels of all heads
        blocks.add_up = lambda sums: all_reduce(sums, context.tensor, context.traffic)
    blocks.tokens = None if ranks is None else RankTokens(blocks.blocks, attention, ranks)
    place, _, layer = gate.rpartition(".")
    for name, block in stage.modules.items() if gate else ():
        module = block.get_submodule(place)
        if getattr(module, layer, None) is not None:
            module.register_forward_pre_hook(functools.partial(compute_gate, attention, name, layer))
    return attention


def compute_gate(attention: StageAttention, block: str, layer: str, module: Any, inputs: tuple) -> None:
    """Pre-forward hook of an attention module: computes VSA's gate [B, s, heads x D] by the module's `layer` from the
    module's input, if the step's attention is VSA (arXiv 2505.13389)."""
    step = attention.step
    if step is None or step.sparse is None:
        return
    settings = step.sparse.settings
    if settings.cubes and block not in settings.full:
        step.gate = getattr(module, layer)(inputs[0])


def build_own_stage(
    checkpoint: Checkpoint,
    span: Span,
    device: torch.device,
    dtype_name: str,
    plan: TensorPlan,
    load: Callable[[StageWeights, Sequence[str]], None],
    link: OwnLink,
) -> Stage:
    """Return the class's model with weights of the blocks `span`, and of everything that a call runs outside of blocks.

    `load` gets the weights on the meta device and the names of the blocks, and reads them from the mapped file. Weights of
    other ranks are never allocated. The rank has only its shards of `plan`; `Stage.plan.apply` must follow. Blocks of other
    stages keep attributes, which the class may read, but no parameters.
    """
    built, dtype = checkpoint.built, compute_dtype(dtype_name, device)
    model = build(built.own, dtype)
    order = built.own.blocks
    kept = [block.name for block in order[span.slice]]
    own = set(kept)
    elsewhere = tuple(f"{block.name}." for block in order if block.name not in own)
    for block in order:
        if block.name not in own:
            without_values(model.get_submodule(block.name))
    plan = replace(plan, plan={name: cuts for name, cuts in plan.plan.items() if not name.startswith(elsewhere)})
    for name in adapter_of(built.own.kind).here:
        without_values(model.get_submodule(name))
    targets = [name for name in checkpoint.key_map if not (name.startswith(elsewhere) or built.is_elsewhere(name))]
    load(StageWeights(model, checkpoint, targets, plan, device, dtype_name), kept)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    stage_blocks = StageBlocks(model, order, span, link)
    if built.own.latent is not None:
        # No NaN, since a packed layer may look for its input's largest value.
        put_idle_modules(model, built.own.latent.idle, lambda: stage_blocks.tokens, 0.0)
    if plan.axis.size > 1:
        for block in order:
            if block.name in own:
                divide(model.get_submodule(block.name), block, plan.axis.index, plan.axis.size)
    return Stage(model, stage_blocks, plan, {name: model.get_submodule(name) for name in kept})


def own_class_to_time(built: BuiltClass, dtype: torch.dtype) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return (the class's model on the meta device, list -> its first block). All other blocks return their arguments."""
    model = build(built.own, dtype)
    first: dict[str, nn.Module] = {}
    for block in built.own.blocks:
        name, module = block.name.rpartition(".")[0], model.get_submodule(block.name)
        if first.setdefault(name, module) is not module:
            leave_out(model, block)
    return model, first


def own_forward(model: nn.Module, call: OwnCall, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that runs the class's forward with this call."""
    tensors, structure = {name: each.to(device) for name, each in call.tensors.items()}, structure_of(call.tensors)
    x, timestep = call.x.to(device, dtype), timestep_of(call.timestep.to(device), structure)
    return lambda: run_call(model, x, timestep, {OPTIONS: {}} | from_tensors(tensors, structure))


def leave_out(model: nn.Module, block: OwnBlock) -> None:
    """Have a block return its arguments, and remove its weights."""
    pass_through(model, [block])
    without_values(model.get_submodule(block.name))


def without_values(block: nn.Module) -> None:
    """Remove the block's parameters and buffers. Attributes stay, because the class may read them."""
    for module in block.modules():
        module._parameters.clear()
        module._buffers.clear()
