"""Has the ranks answer a call of ComfyUI's own class."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from parallel_backend.client.call import ModelCall, Residuals
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.own_class.adapters.minimax_forms import INSIDE
from parallel_backend.own_class.calls.call_arguments import LATENTS, OPTIONS, in_form, unpack
from parallel_backend.own_class.calls.patching import latents_of
from parallel_backend.own_class.calls.residuals import CONTROL, PATCHES, REPLACED

from ..lora.head_bank import strengths_in_call
from ..native.native_call import NativeArguments
from ..patches.reach import Unread, refuse_unread
from ..run.band import BAND_KEY, Band
from ..run.sampling_run import why_not_in_bands
from ..run.step_cache import SamplingCache
from .concurrent_conds import EVALUATION_KEY
from .own_calls import by_entry, joined, own_residuals, returned, shapes, sparse_attention
from .own_changes import OTHER_CALL
from .prepared_call import PROVE_KEY, PreparedCall, RankCall, prepared
from .proofs import Stub


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
    """Return the output of a call of the native model. `is_carried`: whether latents are as the native `forward` gets them;
    otherwise they are as its `_forward` gets them."""
    options, adapter = transformer_options or {}, stub.adapter
    latents = latents_of(x if isinstance(x, torch.Tensor) else tuple(x))
    if adapter.one_entry and len(latents[0]) > 1:
        if BAND_KEY in options:
            raise NotLocal(OTHER_CALL)
        named = {"context": context, "control": control, "transformer_options": options, **extra}
        return joined([answered(stub, **each, is_carried=is_carried) for each in by_entry(x, timestep, named)])
    given = NativeArguments(latents, timestep, {"context": context, **extra}, options)
    call = _in_rank_form(stub, x, given, control, is_carried)
    plan, tensors = prepared(stub, call)
    if PROVE_KEY in options:
        return _tried(stub, call, plan, tensors)
    changes = plan.changes
    if plan.is_sparse:
        sparse = sparse_attention(stub.checkpoint, options, latents, call.given.others, stub.native)
        changes = dataclasses.replace(changes, sparse=sparse)
    if plan.heads > 1:
        stub.run.head_strengths = strengths_in_call(plan.heads, call.timestep, options)
    evaluation = options.get(EVALUATION_KEY)
    start_next = None if evaluation is None else evaluation.start_next
    first_replica = 0 if evaluation is None else evaluation.first_replica(len(call.x))
    may_forecast = stub.run.cache is not None and _may_forecast(stub.run.cache, call)
    sent = latents if plan.in_parts else call.x
    model_call = ModelCall(sent, call.timestep, tensors, call.residuals, changes, first_replica, may_forecast)
    if (band := call.band) is not None:
        exact = band.apart or float(options["sigmas"].max()) > band.exact_above
        out = band.run.predict(band.index, model_call, exact, band.poll, start_next, band.apart)
        return returned(latents_of(out))
    steps = max(0, len(options.get("sample_sigmas", ())) - 1)  # 0: unknown
    out = stub.predict(model_call, plan.shape, steps, start_next)
    if isinstance(out, torch.Tensor) and LATENTS in call.named:
        out = tuple(unpack(out, call.named[LATENTS]))
    return returned(latents_of(out))


def _in_rank_form(stub: Stub, x: Any, given: NativeArguments, control: Any, is_carried: bool) -> RankCall:
    """Return ComfyUI's model call as a RankCall, which ranks and trials can use. Raises ValueError for arguments and
    controls that ranks do not take."""
    latents, patching, adapter = given.latents, stub.checkpoint.built.patching, stub.adapter
    band = stub.band_of(latents, given.options)
    packed, timestep, told_form = in_form(x, given.timestep, patching.axes)
    if len(timestep) == 1:
        timestep = timestep.expand(len(packed), *timestep.shape[1:])
    residuals = _residuals(stub, given, timestep, control, band, is_carried)
    sizes = tuple(latents[0].shape[2:]) if band is None else patching.whole(band.run.layout.grid)
    context, extra = given.others["context"], {name: each for name, each in given.others.items() if name != "context"}
    for name, method in adapter.computed.items():
        if extra.get(name) is not None:
            extra[name] = stub.computed(method, extra[name])
    sent = adapter.arguments(extra, stub.native, sizes)
    named = {"context": context, CONTROL: None, OPTIONS: {}, **sent, **told_form}
    if adapter.carries and not is_carried:
        named[INSIDE] = True
    if band is not None and LATENTS in named:
        named[LATENTS] = [[latents[0].shape[1], *sizes], *(list(shape[1:]) for shape in band.wholes[1:])]
    return RankCall(given, band, sizes, packed, timestep, named, residuals)


def _residuals(
    stub: Stub, given: NativeArguments, timestep: torch.Tensor, control: Any, band: Band | None, is_carried: bool
) -> Residuals:
    """Return the residuals of ControlNets and of controls that run in this process, for the call."""
    latent, options = given.latents[0], given.options
    if control is None and not options.get(PATCHES) and not options.get(REPLACED):
        return {}
    if control is not None and stub.own.unet:
        refuse_unread([Unread(f"'{CONTROL}' conditioning")])
    control = stub.controls_here.with_fun(control, latent, timestep, given.others["context"], options, stub.run)
    residuals = own_residuals(control, latent, None if band is None else band.run.patching)
    if of_all := stub.controls_here.of_all_tokens(given, stub.run, is_carried):
        if band is not None:
            raise NotLocal("a Fun control needs the whole latent")
        residuals |= of_all
    return residuals


def _tried(
    stub: Stub, call: RankCall, plan: PreparedCall, tensors: dict[str, torch.Tensor]
) -> torch.Tensor | list[torch.Tensor]:
    """Return zeros as the output of a call that is only tried. Records whether similar calls can run in bands."""
    if stub.run.whole_calls is not None:
        built = stub.checkpoint.built
        tokens = built.counted(built.patching.grid(call.latents[0].shape), built.words(tensors), tensors)
        stub.run.whole_calls[shapes(tensors)] = tokens
        stub.run.unproven_bands = why_not_in_bands(plan.proof, tokens) or stub.run.unproven_bands
    counts = zip(call.latents, call.given.options[PROVE_KEY], strict=True)
    return returned(tuple(torch.zeros_like(each[:, :count]) for each, count in counts))


def _may_forecast(cache: SamplingCache, call: RankCall) -> bool:
    if call.band is None:
        cache.see(call.latents, call.given.options)
    return cache.may_forecast(call.given.options)
