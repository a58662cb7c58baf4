"""A MODEL of ComfyUI's own class, which runs on ranks once a trial has shown how it can be shared out."""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallel_backend.checkpoints.own_class import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.families.base.patching import Latents, latents_of
from parallel_backend.families.own_class.adapters import carries, check_call, computed_of, sent, takes_one_entry
from parallel_backend.families.own_class.block_order import block_lists
from parallel_backend.families.own_class.building import build, class_of
from parallel_backend.families.own_class.call_arguments import OPTIONS, to_tensors
from parallel_backend.families.own_class.call_form import LATENTS, in_form, unpack
from parallel_backend.families.own_class.counts import misfit
from parallel_backend.families.own_class.example import with_example
from parallel_backend.families.own_class.family import OwnClassFamily, own_class_family
from parallel_backend.families.own_class.minimax_forms import INSIDE
from parallel_backend.families.own_class.proof import Proof
from parallel_backend.families.own_class.residuals import CONTROL, for_trial
from parallel_backend.families.own_class.trial import trial
from parallel_backend.families.own_class.tried_calls import (
    Call,
    does_not_run,
    entry_of,
    numbers_of,
    with_tensors_told,
    with_tried_blocks,
    words_of,
)

from ...ui.host import folder
from ...ui.loading_bar import Elapsed
from ...ui.node_text import say
from ..loading.kept_proofs import is_of_sizes, kept_proof
from ..loading.own_class_file import own_class
from ..loading.own_degrees import shared_out
from ..loading.shipped_plans import shipped_proof
from ..native.native_call import NativeArguments, NativeClass
from ..patches.reach import OURS, refuse_what_does_not_reach_the_ranks
from ..run.band import BAND_KEY, NotTried
from ..run.sampling_run import CallShape, steps_of, tokens_of, why_not_in_bands
from .call_checks import check_for_own_class, for_entries
from .concurrent_conds import EVALUATION_KEY, Evaluation, tell_if_together
from .diffusion_model import RemoteDiffusionModel
from .own_calls import (
    NodeChanges,
    asked,
    by_entry,
    changes_and_options,
    is_held,
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
from .own_methods import TEXT_METHOD, OwnMethods

log = logging.getLogger(__name__)

PROVE_KEY = "parallel_dit_prove"
"""Key in transformer_options of a call that is tried, and not computed: the channels of each of the sampler's latents, to
which ComfyUI may add others."""


class OwnClassModel(RemoteDiffusionModel):
    """Hands each call to ComfyUI's own class on the ranks. A call of another structure than before is tried first."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        if not hasattr(self._meta, "patch_size"):
            del vars(self)["patch_size"]
        else:
            vars(self)["patch_size"] = self._meta.patch_size

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """As RemoteDiffusionModel's."""
        return self.native

    def enlarged(self, sizes: TensorSizes) -> RemoteDiffusionModel:
        """As RemoteDiffusionModel.enlarged: the class that ComfyUI's detection finds for tensors of these sizes."""
        named = ", ".join(f"{short(key)} to {list(shape)}" for key, shape in sizes)
        refusal = ValueError(
            f"model: a LoRA that enlarges {named} cannot run on ranks: ComfyUI has no class {self._own.name} of that size. "
            "Use a LoRA that was made for the model."
        )
        path, conversion = self.setup.path, self.setup.conversion
        try:
            own = own_class(path, self.devices, refusal, conversion, sizes)
            larger = open_own_class(path, own, conversion, sizes)
        except ValueError:
            raise refusal from None
        setup, weights = dataclasses.replace(self.setup, own_class=own, enlarged=sizes), self.weights.enlarged(sizes)
        return type(self)(larger, setup, self.devices, self.comm_overlap, weights, self.native_kind, self.unet_config)

    @property
    def _own(self) -> OwnClass:
        """The class, with what is proven so far."""
        assert self.setup.own_class is not None
        return self.setup.own_class

    @functools.cached_property
    def native(self) -> NativeClass:
        return class_of(self._own)

    @functools.cached_property
    def _meta(self) -> torch.nn.Module:
        """The model without values."""
        return build(self._own)

    @functools.cached_property
    def _methods(self) -> OwnMethods:
        return OwnMethods(self.checkpoint, self.dtype)

    @functools.cached_property
    def _changes(self) -> OwnChanges:
        return OwnChanges()

    @functools.cached_property
    def _fitting(self) -> set[Any]:
        """Widths of a call's tensors that fit the class's layers."""
        return set()

    @functools.cached_property
    def _proofs(self) -> dict[Any, Proof]:
        """By structure of a call."""
        return {}

    def __getattr__(self, name: str) -> Any:
        """Also the native model's own values, such as sizes of patches. ValueError for one of its functions, which ComfyUI
        calls before the model: `hasattr` has to see that it is there."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(self._meta, name):
                raise
            if name == TEXT_METHOD:
                return functools.partial(self._computed, TEXT_METHOD)
        value = getattr(self._meta, name)
        if isinstance(value, torch.nn.Module | torch.Tensor) or inspect.ismethod(value):
            raise ValueError(
                f"model_name: {self.checkpoint.path.name} cannot run on ranks: ComfyUI itself computes with its '{name}'. "
                "Load it with ComfyUI's own loader, on one card."
            )
        return value

    def _computed(self, method: str, *arguments: Any, **named: Any) -> torch.Tensor:
        """OwnMethods.computed with the run's LoRAs."""
        patches, bypass_patches = self.run.patches, self.run.bypass_patches
        both = {key: patches.get(key, []) + bypass_patches.get(key, []) for key in (*patches, *bypass_patches)}
        return self._methods.computed(method, both, self.run.patches_uuid, *arguments, **named)

    def _call(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        context: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        is_carried: bool = True,
        **extra: Any,
    ) -> torch.Tensor | list[torch.Tensor]:
        """As RemoteDiffusionModel._call."""
        options = transformer_options or {}
        latents = latents_of(x if isinstance(x, torch.Tensor) else tuple(x))
        if len(latents[0]) > 1 and takes_one_entry(self._own.kind):
            if BAND_KEY in options:
                raise NotLocal(OTHER_CALL)
            named = {"context": context, "control": control, "transformer_options": options, **extra}
            return joined([self._call(**each, is_carried=is_carried) for each in by_entry(x, timestep, named)])
        axes = 5 if self.checkpoint.family.patching.video else 4
        band = self._band_of(latents, options)
        if band is None:
            check_for_own_class(latents, axes)
        of_latents = timestep
        packed, timestep, told_form = in_form(x, timestep, axes)
        family, batch = self.checkpoint.family, len(packed)
        changes, by_nodes, told = changes_and_options(self.checkpoint, self.setup.attention, options, batch)
        timestep = for_entries(timestep, {}, batch)
        if control is not None and self._own.unet:
            refuse_what_does_not_reach_the_ranks({}, [CONTROL], family)
        control = self.controls_here.with_fun(control, latents[0], timestep, context, options, self.run)
        residuals = own_residuals(control, latents[0], None if band is None else band.run.patching)
        given = NativeArguments(latents, of_latents, {"context": context, **extra}, options)
        if of_all := self.controls_here.of_all_tokens(given, self.run, is_carried):
            if band is not None:
                raise NotLocal("a Fun control looks at the whole latent")
            residuals |= of_all
        sizes = tuple(latents[0].shape[2:]) if band is None else family.patching.whole(band.run.layout.grid)
        check_call(self._own.kind, sizes, extra)
        by_method = {name: each for name, each in computed_of(self._own.kind).items() if extra.get(name) is not None}
        computed = {name: self._computed(method, extra[name]) for name, method in by_method.items()}
        named = {
            "context": context,
            CONTROL: None,
            OPTIONS: told,
            **sent(family.native_classes[0], extra | computed, self.native),
            **told_form,
            **({INSIDE: True} if carries(self._own.kind) and not is_carried else {}),
        }
        if band is not None and LATENTS in named:
            named[LATENTS] = [[latents[0].shape[1], *sizes], *(list(shape[1:]) for shape in band.wholes[1:])]
        told_latent = () if LATENTS in named else (latents[0].shape[1], *sizes)
        tensors = to_tensors(named, timestep, told_latent)
        others = {name: value for name, value in options.items() if name not in told and not name.startswith(OURS)}
        rest = {name: value for name, value in others.items() if is_held(value)}
        added = {CONTROL: for_trial(residuals)} if residuals else {}
        tried = Call(packed, timestep, named | {OPTIONS: with_tried_blocks(told)} | added, rest)
        proof = self._proven(tried, sizes) if band is None else self._of_band(tried, sizes, tensors, band.wholes)
        if PROVE_KEY in options:
            if self.run.whole_calls is not None:
                tokens = self.run.whole_calls[shapes(tensors)] = tokens_of(self.checkpoint.family, latents[0], tensors)
                self.run.unproven_bands = why_not_in_bands(proof, tokens) or self.run.unproven_bands
            channels = options[PROVE_KEY]
            return returned(tuple(torch.zeros_like(each[:, :count]) for each, count in zip(latents, channels, strict=True)))
        fields, more = self._changed(by_nodes, proof, tried, sizes, band is None) if by_nodes else ({}, {})
        sparse = sparse_attention(self.checkpoint, options, latents, given.others, self.native)
        changes = dataclasses.replace(changes, sparse=sparse, **fields)
        if proof.options or more:
            named |= {OPTIONS: told | {name: options[name] for name in proof.options}} | more
            tensors = to_tensors(named, timestep, told_latent)
        self._choose_heads(timestep, options)
        in_parts = LATENTS in named and self.checkpoint.family.patching.companion is not None
        evaluation: Evaluation = options.get(EVALUATION_KEY) or Evaluation([])
        call = ModelCall(
            x=latents if in_parts else packed,
            timestep=timestep,
            tensors=tensors,
            residuals=residuals,
            changes=dataclasses.replace(changes, one_batch=bool(proof.batch)),
            first_replica=evaluation.first_replica(batch),
            may_forecast=self.run.cache is not None and self._may_forecast(latents, options, band is None),
        )
        if band is not None:
            exact = float(options["sigmas"].max()) > band.exact_above
            own_rows = band.run.predict(band.index, call, exact, band.poll, evaluation.start_next)
            return returned(latents_of(own_rows))
        shape = CallShape(tuple(latents[0].shape), 1 if context is None else context.shape[1])
        out = self._predict(call, shape, steps_of(options), evaluation)
        if isinstance(out, torch.Tensor) and LATENTS in named:
            out = tuple(unpack(out, named[LATENTS]))
        return returned(latents_of(out))

    def _changed(
        self, asked: NodeChanges, proof: Proof, call: Call, sizes: tuple[int, ...], is_whole: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See OwnChanges.of. A band's are those of the whole latent's call."""
        call = with_tensors_told(call) if proof.options else call
        if not is_whole:
            assert isinstance(self.checkpoint.family, OwnClassFamily)
            call = whole_call(call, self.checkpoint.family.call, sizes, proof, asked)
        lists, tensor = block_lists(self._meta), self.setup.degrees.tensor
        found = self._changes.of(self._own, lists, proof, call, sizes, self._times(), tensor, asked)
        if found[0].get("guidance"):
            tell_if_together(self)
        return found

    def _times(self) -> tuple[float, ...]:
        patcher = self.run.patcher()
        return () if patcher is None else times_of(patcher.model.model_sampling)

    def _may_forecast(self, latents: Latents, options: dict[str, Any], is_whole: bool) -> bool:
        cache = self.run.cache
        assert cache is not None
        if is_whole:
            cache.see(latents, options)
        return cache.may_forecast(options)

    def prove(self, run: Callable[[dict[str, Any]], Any], channels: Sequence[int], bands: bool = True) -> str:
        """Have the class tried for a run before its model is loaded: why `bands` are not proven. Empty: they are.

        `run` makes the calls of a step with these entries of transformer_options, which get zeros. `channels`: of each of
        the sampler's latents.
        """
        self.run.whole_calls, self.run.unproven_bands = {} if bands else None, ""
        run({PROVE_KEY: channels})
        return self.run.unproven_bands

    def without_bands(self, reason: str) -> str:
        """The refusal of bands that the user has asked for."""
        name = self.checkpoint.path.name
        if (degrees := self.setup.degrees).patch > 1:
            return f"patch_degree: {name} cannot run in {degrees.patch_mode} patches: {reason}. Set it to 1."
        return (
            f"model: {name} cannot run in PipeFusion's patches: {reason}. Leave Apply PipeFusion out, and it runs by stages."
        )

    def _of_band(
        self, call: Call, sizes: tuple[int, ...], tensors: dict[str, torch.Tensor], wholes: Sequence[Sequence[int]]
    ) -> Proof:
        """The proof for a band's call. NotTried if there is none, and NotLocal if it is not the one by which the model was
        loaded. `wholes`: shapes of the whole latents."""
        proof = self._kept_proof(self._key(call, sizes), numbers_of(call))
        if proof is None:
            whole = call.with_latents([torch.zeros(len(call.x), *shape[1:]) for shape in wholes])
            raise NotTried(OTHER_CALL, functools.partial(self._proven, whole, sizes))
        if (proof.blocks, proof.latent) != (self._own.blocks, self._own.latent):
            raise NotLocal(OTHER_CALL)
        if shapes(tensors) not in (self.run.whole_calls or ()):
            raise NotLocal("a patch has other conditioning than the whole latent")
        return proof

    def _key(self, call: Call, sizes: tuple[int, ...]) -> tuple[str, bool, bool, int]:
        """What a trial is for. Only a run in bands has bands tried, since that takes many calls of the model, and a plan is
        made of all modes."""
        degrees = self.setup.degrees
        bands = self.run.whole_calls is not None or degrees.naive
        return structure(call, sizes), degrees.sequence > 1 or bool(self.setup.planned), bands, degrees.tensor

    def _kept_proof(
        self, key: tuple[str, bool, bool, int], numbers: Mapping[str, Any], sizes: tuple[int, ...] | None = None
    ) -> Proof | None:
        """`sizes`: see kept_proof. None: of a call whose refusal would be no help."""
        of_numbers = key, tuple(numbers.items())
        found = self._proofs.get(key) or self._proofs.get(of_numbers) or self._proofs.get((*of_numbers, sizes))
        with_bands = key[0], key[1], True, key[3]
        return self._kept_proof(with_bands, numbers, sizes) if found is None and key != with_bands else found

    def _proven(self, call: Call, sizes: tuple[int, ...]) -> Proof:
        """The proof for such calls, from now on that of `setup`. ValueError if the degrees are not proven."""
        own = self._own
        name, degrees, numbers = self.checkpoint.path.name, self.setup.degrees, numbers_of(call)
        key = _, sequence, bands, tensor = self._key(call, sizes)
        tried_sizes = *call.x.shape, words_of(call)
        proof = self._kept_proof(key, numbers, tried_sizes)
        if is_new := proof is None:
            call = Call(call.x.cpu(), call.timestep.cpu(), on_host(call.named), on_host(call.options))
            times = self._times()

            def prove() -> Proof:
                poll = Elapsed(f"trying {own.name}, ComfyUI's own class, before its weights are loaded")
                return trial(own, call, times, poll, sequence, bands, tensor)

            lists, plan = block_lists(self._meta), asked(call, sizes, times, sequence, bands, tensor)
            proof, how = (None, "") if degrees.naive else shipped_proof(own, plan, lists)  # plans lack a trial of naive ones
            of_these = False
            if proof is None:
                proof = kept_proof(folder() / "proofs", own, repr((key, near(times))), prove, numbers, tried_sizes)
                of_these = is_of_sizes(proof)
            of_numbers = key, tuple(numbers.items())
            place = (*of_numbers, tried_sizes) if of_these else key if proof.is_of_all(numbers) else of_numbers
            self._proofs[place] = proof
            if not proof.batch:  # each entry alone is proven, too: guidance calls the model with some of a batch
                alone = structure(entry_of(call, 0), sizes), *key[1:]
                self._proofs[alone if place == key else (alone, *place[1:])] = proof
            ways = "stages", "batch", "sequence", "bands", "tensor"
            shown = ", ".join(f"{way} {getattr(proof, way) or 'yes'}" for way in ways)
            log.info("Parallel DiT: proof of %s: %s", own.name, shown)
        self.run.proof = proof
        proof.check(degrees, name)
        if degrees.naive and proof.latent is not None and (why := proof.latent.why_uneven(sizes)):
            raise ValueError(self.without_bands(why))
        if not proof.blocks and (proof.batch or not own.unet):
            raise ValueError(f"model_name: {name} cannot run on ranks: {proof.stages}. Load it with ComfyUI's own loader.")
        assert isinstance(self.checkpoint.family, OwnClassFamily)
        known = self.checkpoint.family.call
        is_known = known is not None and (*known.x.shape, words_of(known)) == tried_sizes
        if own.blocks is not proof.blocks or own.latent != proof.latent or not is_known:
            self.setup = self.setup.with_blocks(proof.blocks, proof.latent)
            example = with_tensors_told(call) if proof.options else call
            family = with_example(own_class_family(self._own), example)
            self.checkpoint = dataclasses.replace(self.checkpoint, family=family)
        if not own.unet and (widths := widths_of(call)) not in self._fitting:
            if error := misfit(self._own, call):
                raise does_not_run(own, call, error)
            self._fitting.add(widths)
        if is_new:
            lines = [f"{own.name}, ComfyUI's own class, verified{how}{shared_out(proof, self._meta, degrees)}"]
            lines += [] if degrees.pipe == degrees.sequence == degrees.tensor == 1 else [share_of_work(self._own, call)]
            say("\n".join(f"Parallel DiT: {line}" for line in lines if line))
        return proof
