"""A MODEL's calls: each is tried until it is shown how ranks share it out, and then handed to them."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.adapters.minimax_forms import INSIDE
from parallel_backend.own_class.built.built_class import built_class
from parallel_backend.own_class.built.counts import misfit
from parallel_backend.own_class.calls.call_arguments import LATENTS, OPTIONS, in_form, to_tensors, unpack
from parallel_backend.own_class.calls.patching import Latents, latents_of
from parallel_backend.own_class.calls.residuals import CONTROL, for_trial
from parallel_backend.own_class.calls.tried_calls import (
    Call,
    does_not_run,
    entry_of,
    numbers_of,
    with_tensors_told,
    with_tried_blocks,
    words_of,
)
from parallel_backend.own_class.plans.block_order import block_lists
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.own_class.trials.trial import trial

from ...ui.host import folder
from ...ui.loading_bar import Elapsed
from ...ui.node_text import say
from ..controls.controls_here import ControlsHere
from ..loading.kept_proofs import is_of_sizes, kept_proof
from ..loading.own_degrees import shared_out
from ..loading.shipped_plans import shipped_proof
from ..native.native_call import NativeArguments, NativeClass
from ..patches.reach import OURS, Unread, refuse_unread
from ..run.band import BAND_KEY, Band, NotTried
from ..run.sampling_run import CallShape, SamplingRun, steps_of, tokens_of, why_not_in_bands
from .call_checks import check_latents, for_entries
from .concurrent_conds import EVALUATION_KEY, Evaluation, tell_if_together
from .own_calls import (
    NodeChanges,
    asked,
    by_entry,
    changes_and_options,
    has_rows_of,
    joined,
    near,
    on_host,
    own_residuals,
    returned,
    shapes,
    share_of_work,
    sparse_attention,
    structure,
    times_of,
    widths_of,
)
from .own_changes import OTHER_CALL, OwnChanges, whole_call

log = logging.getLogger(__name__)

PROVE_KEY = "parallel_dit_prove"
"""Key in transformer_options of a call that is tried, and not computed: the channels of each of the sampler's latents, to
which ComfyUI may add others."""

Key = tuple[str, bool, bool, int]
"""What a trial is for: structure of the call, whether tokens are cut, whether in bands, tensor degree."""


@dataclass
class Proofs:
    """What trials of a MODEL's calls have shown."""

    known: dict[Any, Proof] = field(default_factory=dict)
    """By structure of a call."""
    changes: OwnChanges = field(default_factory=OwnChanges)
    fitting: set[Any] = field(default_factory=set)
    """Widths of a call's tensors that fit the class's layers."""

    def kept(self, key: Key, numbers: Mapping[str, Any], sizes: tuple[int, ...] | None = None) -> Proof | None:
        """`sizes`: see kept_proof. None: of a call whose refusal would be no help."""
        of_numbers = key, tuple(numbers.items())
        found = self.known.get(key) or self.known.get(of_numbers) or self.known.get((*of_numbers, sizes))
        with_bands = key[0], key[1], True, key[3]
        return self.kept(with_bands, numbers, sizes) if found is None and key != with_bands else found


class Stub(Protocol):
    """RemoteDiffusionModel, as far as its calls are tried and answered here."""

    checkpoint: Checkpoint
    setup: Setup
    run: SamplingRun

    @property
    def own(self) -> OwnClass: ...
    @property
    def native(self) -> NativeClass: ...
    @property
    def meta(self) -> torch.nn.Module: ...
    @property
    def proofs(self) -> Proofs: ...
    @property
    def controls_here(self) -> ControlsHere: ...

    def computed(self, method: str, *arguments: Any, **named: Any) -> torch.Tensor: ...
    def choose_heads(self, timestep: torch.Tensor, options: Mapping[str, Any]) -> None: ...
    def band_of(self, latents: Latents, options: dict[str, Any]) -> Band | None: ...
    def without_bands(self, reason: str) -> str: ...
    def predict(self, call: ModelCall, shape: CallShape, steps: int, evaluation: Evaluation) -> torch.Tensor | Latents: ...


def answered(
    stub: Stub,
    x: torch.Tensor | Sequence[torch.Tensor],
    timestep: torch.Tensor | Sequence[torch.Tensor],
    context: torch.Tensor | None = None,
    control: Any = None,
    transformer_options: dict[str, Any] | None = None,
    is_carried: bool = True,
    **extra: Any,
) -> torch.Tensor | list[torch.Tensor]:
    """The output of a call of the native model. `is_carried`: latents are as its `forward` gets them, and not as its
    `_forward` does."""
    options = transformer_options or {}
    latents = latents_of(x if isinstance(x, torch.Tensor) else tuple(x))
    if len(latents[0]) > 1 and adapter_of(stub.own.kind).one_entry:
        if BAND_KEY in options:
            raise NotLocal(OTHER_CALL)
        named = {"context": context, "control": control, "transformer_options": options, **extra}
        return joined([answered(stub, **each, is_carried=is_carried) for each in by_entry(x, timestep, named)])
    axes = 5 if stub.checkpoint.built.patching.video else 4
    band = stub.band_of(latents, options)
    if band is None:
        check_latents(latents, axes)
    of_latents = timestep
    packed, timestep, told_form = in_form(x, timestep, axes)
    built, batch = stub.checkpoint.built, len(packed)
    changes, by_nodes, told = changes_and_options(stub.checkpoint, stub.setup.attention, options, batch)
    timestep = for_entries(timestep, batch)
    if control is not None and stub.own.unet:
        refuse_unread([Unread(f"'{CONTROL}' conditioning")])
    control = stub.controls_here.with_fun(control, latents[0], timestep, context, options, stub.run)
    residuals = own_residuals(control, latents[0], None if band is None else band.run.patching)
    given = NativeArguments(latents, of_latents, {"context": context, **extra}, options)
    if of_all := stub.controls_here.of_all_tokens(given, stub.run, is_carried):
        if band is not None:
            raise NotLocal("a Fun control needs the whole latent")
        residuals |= of_all
    sizes = tuple(latents[0].shape[2:]) if band is None else built.patching.whole(band.run.layout.grid)
    adapter = adapter_of(stub.own.kind)
    by_method = {name: each for name, each in adapter.computed.items() if extra.get(name) is not None}
    computed = {name: stub.computed(method, extra[name]) for name, method in by_method.items()}
    named = {
        "context": context,
        CONTROL: None,
        OPTIONS: told,
        **adapter.arguments(extra | computed, stub.native, sizes),
        **told_form,
        **({INSIDE: True} if adapter.carries and not is_carried else {}),
    }
    if band is not None and LATENTS in named:
        named[LATENTS] = [[latents[0].shape[1], *sizes], *(list(shape[1:]) for shape in band.wholes[1:])]
    told_latent = () if LATENTS in named else (latents[0].shape[1], *sizes)
    tensors = to_tensors(named, timestep, told_latent)
    others = {name: value for name, value in options.items() if name not in told and not name.startswith(OURS)}
    rest = {name: value for name, value in others.items() if has_rows_of(value)}
    added = {CONTROL: for_trial(residuals)} if residuals else {}
    tried = Call(packed, timestep, named | {OPTIONS: with_tried_blocks(told)} | added, rest)
    proof = proven(stub, tried, sizes) if band is None else _of_band(stub, tried, sizes, tensors, band.wholes)
    if PROVE_KEY in options:
        if stub.run.whole_calls is not None:
            tokens = stub.run.whole_calls[shapes(tensors)] = tokens_of(stub.checkpoint.built, latents[0], tensors)
            stub.run.unproven_bands = why_not_in_bands(proof, tokens) or stub.run.unproven_bands
        channels = options[PROVE_KEY]
        return returned(tuple(torch.zeros_like(each[:, :count]) for each, count in zip(latents, channels, strict=True)))
    fields, more = _changed(stub, by_nodes, proof, tried, sizes, band is None) if by_nodes else ({}, {})
    sparse = sparse_attention(stub.checkpoint, options, latents, given.others, stub.native)
    changes = dataclasses.replace(changes, sparse=sparse, **fields)
    if proof.options or more:
        named |= {OPTIONS: told | {name: options[name] for name in proof.options}} | more
        tensors = to_tensors(named, timestep, told_latent)
    stub.choose_heads(timestep, options)
    in_parts = LATENTS in named and stub.checkpoint.built.patching.companion is not None
    evaluation: Evaluation = options.get(EVALUATION_KEY) or Evaluation([])
    call = ModelCall(
        x=latents if in_parts else packed,
        timestep=timestep,
        tensors=tensors,
        residuals=residuals,
        changes=dataclasses.replace(changes, one_batch=bool(proof.batch)),
        first_replica=evaluation.first_replica(batch),
        may_forecast=_may_forecast(stub, latents, options, band is None),
    )
    if band is not None:
        exact = float(options["sigmas"].max()) > band.exact_above
        own_rows = band.run.predict(band.index, call, exact, band.poll, evaluation.start_next)
        return returned(latents_of(own_rows))
    shape = CallShape(tuple(latents[0].shape), 1 if context is None else context.shape[1])
    out = stub.predict(call, shape, steps_of(options), evaluation)
    if isinstance(out, torch.Tensor) and LATENTS in named:
        out = tuple(unpack(out, named[LATENTS]))
    return returned(latents_of(out))


def _may_forecast(stub: Stub, latents: Latents, options: dict[str, Any], is_whole: bool) -> bool:
    cache = stub.run.cache
    if cache is not None and is_whole:
        cache.see(latents, options)
    return cache is not None and cache.may_forecast(options)


def _changed(
    stub: Stub, asked: NodeChanges, proof: Proof, call: Call, sizes: tuple[int, ...], is_whole: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """See OwnChanges.of. A band's are those of the whole latent's call."""
    call = with_tensors_told(call) if proof.options else call
    if not is_whole:
        call = whole_call(call, stub.checkpoint.built.call, sizes, proof, asked)
    lists, tensor = block_lists(stub.meta), stub.setup.degrees.tensor
    found = stub.proofs.changes.of(stub.own, lists, proof, call, sizes, _times(stub), tensor, asked)
    if found[0].get("guidance"):
        tell_if_together(stub)
    return found


def _times(stub: Stub) -> tuple[float, ...]:
    patcher = stub.run.patcher()
    return () if patcher is None else times_of(patcher.model.model_sampling)


def _of_band(
    stub: Stub,
    call: Call,
    sizes: tuple[int, ...],
    tensors: dict[str, torch.Tensor],
    wholes: Sequence[Sequence[int]],
) -> Proof:
    """The proof for a band's call. NotTried if there is none, and NotLocal if it is not the one by which the model was
    loaded. `wholes`: shapes of the whole latents."""
    proof = stub.proofs.kept(_key(stub, call, sizes), numbers_of(call))
    if proof is None:
        whole = call.with_latents([torch.zeros(len(call.x), *shape[1:]) for shape in wholes])
        raise NotTried(OTHER_CALL, functools.partial(proven, stub, whole, sizes))
    if (proof.blocks, proof.latent) != (stub.own.blocks, stub.own.latent):
        raise NotLocal(OTHER_CALL)
    if shapes(tensors) not in (stub.run.whole_calls or ()):
        raise NotLocal("a patch has other conditioning than the whole latent")
    return proof


def _key(stub: Stub, call: Call, sizes: tuple[int, ...]) -> Key:
    """What a trial is for. Bands are tried only for a run in bands, since that takes many calls of the model, and for words
    that run once; and a plan is made of all modes."""
    degrees = stub.setup.degrees
    bands = stub.run.whole_calls is not None or degrees.naive or adapter_of(stub.own.kind).steady
    return structure(call, sizes), degrees.sequence > 1 or bool(stub.setup.planned), bands, degrees.tensor


def proven(stub: Stub, call: Call, sizes: tuple[int, ...]) -> Proof:
    """The proof for such calls, from now on that of `setup`. ValueError if the degrees are not proven."""
    own = stub.own
    name, degrees, numbers = stub.checkpoint.path.name, stub.setup.degrees, numbers_of(call)
    key = _, sequence, bands, tensor = _key(stub, call, sizes)
    tried_sizes = *call.x.shape, words_of(call)
    proof = stub.proofs.kept(key, numbers, tried_sizes)
    if is_new := proof is None:
        call = Call(call.x.cpu(), call.timestep.cpu(), on_host(call.named), on_host(call.options))
        times = _times(stub)

        def prove() -> Proof:
            poll = Elapsed(f"trying {own.name}, ComfyUI's own class, before its weights are loaded")
            return trial(own, call, times, poll, sequence, bands, tensor)

        lists, plan = block_lists(stub.meta), asked(call, sizes, times, sequence, bands, tensor)
        proof, how = (None, "") if degrees.naive else shipped_proof(own, plan, lists)  # plans lack a trial of naive ones
        of_these = False
        if proof is None:
            proof = kept_proof(folder() / "proofs", own, repr((key, near(times))), prove, numbers, tried_sizes)
            of_these = is_of_sizes(proof)
        of_numbers = key, tuple(numbers.items())
        place = (*of_numbers, tried_sizes) if of_these else key if proof.is_of_all(numbers) else of_numbers
        stub.proofs.known[place] = proof
        if not proof.batch:  # each entry alone is proven, too: guidance calls the model with some of a batch
            alone = structure(entry_of(call, 0), sizes), *key[1:]
            stub.proofs.known[alone if place == key else (alone, *place[1:])] = proof
        ways = "stages", "batch", "sequence", "bands", "tensor"
        shown = ", ".join(f"{way} {getattr(proof, way) or 'yes'}" for way in ways)
        log.info("Parallel DiT: proof of %s: %s", own.name, shown)
    stub.run.proof = proof
    proof.check(degrees, name)
    if degrees.naive and proof.latent is not None and (why := proof.latent.why_uneven(sizes)):
        raise ValueError(stub.without_bands(why))
    if not proof.blocks and (proof.batch or not own.unet):
        raise ValueError(f"model_name: {name} cannot run on ranks: {proof.stages}. Load it with ComfyUI's own loader.")
    known = stub.checkpoint.built.call
    is_known = known is not None and (*known.x.shape, words_of(known)) == tried_sizes
    if own.blocks is not proof.blocks or own.latent != proof.latent or not is_known:
        stub.setup = stub.setup.with_blocks(proof.blocks, proof.latent)
        example = with_tensors_told(call) if proof.options else call
        built = dataclasses.replace(built_class(stub.own), call=example)
        stub.checkpoint = dataclasses.replace(stub.checkpoint, built=built)
    if not own.unet and (widths := widths_of(call)) not in stub.proofs.fitting:
        if error := misfit(stub.own, call):
            raise does_not_run(own, call, error)
        stub.proofs.fitting.add(widths)
    if is_new:
        lines = [f"{own.name}, ComfyUI's own class, verified{how}{shared_out(proof, stub.meta, degrees)}"]
        lines += [] if degrees.pipe == degrees.sequence == degrees.tensor == 1 else [share_of_work(stub.own, call)]
        say("\n".join(f"Parallel DiT: {line}" for line in lines if line))
    return proof
