"""Decisions made once for all calls of a sampling run that differ only in values."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.client.call import Residuals
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.calls.call_arguments import LATENTS, OPTIONS, STRUCTURE, tensors_in, to_tensors
from parallel_backend.own_class.calls.patching import Latents
from parallel_backend.own_class.calls.residuals import CONTROL, for_trial
from parallel_backend.own_class.calls.tried_calls import Call, with_tensors_told, with_tried_blocks
from parallel_backend.own_class.plans.block_order import block_lists
from parallel_backend.own_class.plans.proof import Proof

from ..native.native_call import NativeArguments, is_plain
from ..patches.reach import BOOKKEEPING, FOR_PATCHES, OURS, OVERRIDE
from ..patches.sparse_attention import below
from ..patches.sparse_attention import is_sparse as has_override
from ..run.band import BAND_KEY, Band
from ..run.sampling_run import CallShape
from .concurrent_conds import EVALUATION_KEY, tell_if_together
from .own_calls import NodeChanges, changes_and_options, is_sparse, shapes
from .own_changes import whole_call
from .proofs import Stub, of_band, proven, times_of_run

PROVE_KEY = "parallel_dit_prove"
"""Key in transformer_options of a call that is only tried: the channels of each of the sampler's latents, to which ComfyUI
may add others."""
OF_EACH_CALL = (BOOKKEEPING | FOR_PATCHES) - {"cond_or_uncond"}
"""Entries of transformer_options whose values do not affect decisions here."""
MOST_PREPARED = 64
"""Maximum number of PreparedCalls of a run; then all are dropped. Nodes may put other functions or numbers into each
call."""


@dataclass(frozen=True)
class RankCall:
    """A call of the native model, with its arguments as ranks and trials get them (call_arguments.py)."""

    given: NativeArguments
    band: Band | None
    """The band that the call computes. None: it is for the whole latent."""
    sizes: tuple[int, ...]
    """(Frames,) rows and columns of the whole latent."""
    x: torch.Tensor
    timestep: torch.Tensor
    """[B, ...]"""
    named: Mapping[str, Any]
    """The other arguments. OPTIONS is empty."""
    residuals: Residuals

    @property
    def latents(self) -> Latents:
        return self.given.latents

    @property
    def latent(self) -> tuple[int, ...]:
        """The value of call_arguments.LATENT."""
        return () if LATENTS in self.named else (self.latents[0].shape[1], *self.sizes)

    def structure(self, told: Mapping[str, Any], more: Mapping[str, Any] = {}) -> torch.Tensor:
        """The tensor call_arguments.STRUCTURE. `told`: the transformer_options for ranks. `more`: further arguments."""
        return to_tensors({**self.named, OPTIONS: told, **more}, self.timestep, self.latent)[STRUCTURE]

    def likeness(self) -> tuple[Hashable, list[torch.Tensor]]:
        """Return the key of the PreparedCall that the call can use, and the call's tensors, those in `named` first. Calls
        that only differ in values have equal keys."""
        options = {
            name: None if name in OF_EACH_CALL else value
            for name, value in self.given.options.items()
            if name not in (EVALUATION_KEY, BAND_KEY, PROVE_KEY)
        }
        if OVERRIDE in options:  # Model Sparse Attention may put a new function there before each evaluation
            options[OVERRIDE] = has_override(options[OVERRIDE]), below(options[OVERRIDE])
        wholes = None if self.band is None else self.band.wholes
        tensors: list[torch.Tensor] = []
        values = self.named, wholes, self.sizes, self.given.latents, self.timestep, self.residuals, options
        return likeness(values, tensors), tensors


@dataclass(frozen=True)
class PreparedCall:
    """Decisions for similar calls, valid as long as the model has this `setup`. Creating one raises ValueError for requests
    that ranks cannot compute."""

    setup: Setup
    changes: BlockChanges
    """Without `sparse`, which depends on the call's sigma."""
    is_sparse: bool
    """Whether Model Sparse Attention is on the MODEL."""
    proof: Proof
    named: tuple[tuple[str, bool], ...]
    """For each tensor in RankCall.named, in order: its name as a conditioning tensor, and whether it has a row for each
    entry."""
    fixed: dict[str, torch.Tensor]
    """Conditioning tensors that are equal in all calls: STRUCTURE, and the second text of a guidance."""
    shape: CallShape
    in_parts: bool
    """Whether ranks get the latents apart: a video's and its audio's."""
    heads: int
    """Number of output heads, see RemoteDiffusionModel.heads_of."""

    def tensors(self, call: RankCall, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the call's conditioning tensors. `given`: those of `likeness`."""
        batch, rows = len(call.x), zip(self.named, given, strict=False)
        found = {name: each if has_rows else each.expand(batch, *each.shape) for (name, has_rows), each in rows}
        if self.proof.options:
            found |= tensors_in({OPTIONS: {name: call.given.options[name] for name in self.proof.options}}, batch)
        return found | self.fixed


def prepared(stub: Stub, call: RankCall) -> tuple[PreparedCall, dict[str, torch.Tensor]]:
    """Return the run's PreparedCall for this call, and the call's conditioning tensors. The first call of its likeness
    creates the PreparedCall."""
    known, (key, given) = stub.run.prepared, call.likeness()
    found = known.get(key)
    if found is None or found.setup is not stub.setup:
        if len(known) >= MOST_PREPARED:
            known.clear()
        found = known[key] = _prepare(stub, call, given)
    return found, found.tensors(call, given)


def _prepare(stub: Stub, call: RankCall, given: Sequence[torch.Tensor]) -> PreparedCall:
    options, context = call.given.options, call.given.others["context"]
    _check(call, stub.checkpoint.built.patching.axes)
    changes, by_nodes, told = changes_and_options(stub.checkpoint, stub.setup.attention, options, len(call.x))
    call.structure(told)  # refuses what cannot be sent, before anything is tried
    others = {name: value for name, value in options.items() if name not in told and not name.startswith(OURS)}
    rest = {name: value for name, value in others.items() if isinstance(value, torch.Tensor) or is_plain(value)}
    added = {CONTROL: for_trial(call.residuals)} if call.residuals else {}
    tried = Call(call.x, call.timestep, {**call.named, OPTIONS: with_tried_blocks(told), **added}, rest)
    band = call.band
    proof = proven(stub, tried, call.sizes) if band is None else of_band(stub, tried, call.sizes, band.wholes)
    fields, more = _changed(stub, by_nodes, proof, tried, call) if by_nodes else ({}, {})
    structure = call.structure(told | {name: options[name] for name in proof.options}, more)
    named = tensors_in(call.named, len(call.x))
    made = PreparedCall(
        setup=stub.setup,
        proof=proof,
        changes=dataclasses.replace(changes, one_batch=bool(proof.batch), **fields),
        is_sparse=is_sparse(options),
        named=tuple((name, sent is own) for (name, sent), own in zip(named.items(), given, strict=False)),
        fixed=tensors_in(more, len(call.x)) | {STRUCTURE: structure},
        shape=CallShape(tuple(call.latents[0].shape), 1 if context is None else context.shape[1]),
        in_parts=LATENTS in call.named and stub.checkpoint.built.patching.companion is not None,  # a trial finds it
        heads=stub.heads_of(stub.run.patches),
    )
    if band is not None and shapes(made.tensors(call, given)) not in (stub.run.whole_calls or ()):
        raise NotLocal("a patch has different conditioning from the whole latent")
    return made


def _check(call: RankCall, axes: int) -> None:
    """Raise ValueError for a whole latent or timesteps that ranks do not take. `axes`: the first latent's number of axes."""
    if call.band is None and (call.latents[0].ndim != axes or any(0 in latent.shape for latent in call.latents)):
        raise ValueError(
            f"latent_image: this model takes one latent with {axes} axes, none of them empty. Use the Empty Latent node "
            "made for this model."
        )
    if len(call.timestep) != len(call.x):
        raise ValueError(
            f"model: another node calls it with {len(call.x)} latents at a time, and with {len(call.timestep)} timesteps. "
            "Remove that node, or load the model with ComfyUI's own loader."
        )


def _changed(
    stub: Stub, asked: NodeChanges, proof: Proof, tried: Call, call: RankCall
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result of OwnChanges.of. A band's changes are those of the whole latent's call."""
    tried = with_tensors_told(tried) if proof.options else tried
    if call.band is not None:
        tried = whole_call(tried, stub.checkpoint.built.call, call.sizes, proof, asked)
    lists, tensor = block_lists(stub.meta), (stub.run.before or stub.setup).degrees.tensor
    found = stub.proofs.changes.of(stub.own, lists, proof, tried, call.sizes, times_of_run(stub), tensor, asked)
    if found[0].get("guidance"):
        tell_if_together(stub)
    return found


PLAIN = frozenset({bool, int, float, str, type(None)})


class Itself:
    """Wraps an object so that it only equals itself. It is kept alive, so that no later object gets its id."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def likeness(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Equal for tensors of one shape and dtype, for equal plain values of one type, and for the same other object; and for
    lists and dictionaries of these in equal order. Adds the tensors to `tensors`."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.dtype, value.shape
    if isinstance(value, dict):
        return tuple([(name, likeness(each, tensors)) for name, each in value.items()])
    return (kind, *[likeness(each, tensors) for each in value]) if isinstance(value, (list, tuple)) else Itself(value)
