"""Proofs of a MODEL's calls: how ranks can split the class in them, as trials have shown."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import ModelCall, StartNext
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.adapters.adapters import Adapter
from parallel_backend.own_class.built.built_class import built_class
from parallel_backend.own_class.built.counts import misfit
from parallel_backend.own_class.calls.patching import Latents
from parallel_backend.own_class.calls.tried_calls import (
    Call,
    does_not_run,
    entry_of,
    numbers_of,
    with_tensors_told,
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
from ..loading.shipped_plans import shipped_proof
from ..lora.patch_trial import Patch
from ..native.native_call import NativeClass
from ..run.band import Band, NotTried
from ..run.sampling_run import CallShape, SamplingRun
from .own_calls import asked, near, on_host, share_of_work, structure, times_of, widths_of
from .own_changes import OTHER_CALL, OwnChanges

log = logging.getLogger(__name__)

Key = tuple[str, bool, bool, int]
"""Key of a trial: structure of the call, whether tokens are cut, whether there are bands, tensor degree."""


@dataclass
class Proofs:
    """Results of the trials of a MODEL's calls."""

    known: dict[Any, Proof] = field(default_factory=dict)
    """Structure of a call -> its proof."""
    changes: OwnChanges = field(default_factory=OwnChanges)
    fitting: set[Any] = field(default_factory=set)
    """Widths of a call's tensors that fit the class's layers."""

    def kept(self, key: Key, numbers: Mapping[str, Any], sizes: tuple[int, ...] | None = None) -> Proof | None:
        """Return the stored proof for a trial with this key, or one that also covers bands. None: there is none. `numbers`:
        the call's. `sizes`: see kept_proof. None: only proofs that are valid for all sizes count."""
        of_numbers = key, tuple(numbers.items())
        found = self.known.get(key) or self.known.get(of_numbers) or self.known.get((*of_numbers, sizes))
        with_bands = key[0], key[1], True, key[3]
        return self.kept(with_bands, numbers, sizes) if found is None and key != with_bands else found


class Stub(Protocol):
    """The attributes of RemoteDiffusionModel that trials and answers of its calls use."""

    checkpoint: Checkpoint
    setup: Setup
    run: SamplingRun

    @property
    def own(self) -> OwnClass: ...
    @property
    def adapter(self) -> Adapter: ...
    @property
    def native(self) -> NativeClass: ...
    @property
    def meta(self) -> torch.nn.Module: ...
    @property
    def proofs(self) -> Proofs: ...
    @property
    def controls_here(self) -> ControlsHere: ...

    def computed(self, method: str, *arguments: Any, **named: Any) -> torch.Tensor: ...
    def heads_of(self, patches: Mapping[str, list[Patch]]) -> int: ...
    def band_of(self, latents: Latents, options: dict[str, Any]) -> Band | None: ...
    def without_bands(self, reason: str) -> str: ...
    def predict(self, call: ModelCall, shape: CallShape, steps: int, start_next: StartNext) -> torch.Tensor | Latents: ...


def times_of_run(stub: Stub) -> tuple[float, ...]:
    """Return the timesteps of the run's model sampling, see times_of. Empty: no sampler makes the call."""
    patcher = stub.run.patcher()
    return () if patcher is None else times_of(patcher.model.model_sampling)


def of_band(stub: Stub, call: Call, sizes: tuple[int, ...], wholes: Sequence[Sequence[int]]) -> Proof:
    """Return the proof for a band's call. `wholes`: shapes of the whole latents. Raises NotTried if there is no proof,
    NotLocal if it is not the one with which the model was loaded."""
    proof = stub.proofs.kept(_key(stub, call, sizes), numbers_of(call))
    if proof is None:
        whole = call.with_latents([torch.zeros(len(call.x), *shape[1:]) for shape in wholes])
        raise NotTried(OTHER_CALL, functools.partial(proven, stub, whole, sizes))
    if (proof.blocks, proof.latent) != (stub.own.blocks, stub.own.latent):
        raise NotLocal(OTHER_CALL)
    return proof


def _key(stub: Stub, call: Call, sizes: tuple[int, ...]) -> Key:
    """Key of the trial for this call. Bands are only tried for a run in bands, for naive patches and for steady text,
    because they need many calls of the model. With `planned`, tokens are tried too, because a plan compares all modes."""
    setup = stub.run.before or stub.setup
    degrees = setup.degrees
    bands = stub.run.whole_calls is not None or degrees.naive or stub.adapter.steady
    return structure(call, sizes), degrees.sequence > 1 or bool(setup.planned), bands, degrees.tensor


def proven(stub: Stub, call: Call, sizes: tuple[int, ...]) -> Proof:
    """Store the proof for such calls in `setup`, and return it. Raises ValueError if the degrees are not proven."""
    key, tried_sizes = _key(stub, call, sizes), (*call.x.shape, words_of(call))
    proof, how = stub.proofs.kept(key, numbers_of(call), tried_sizes), None
    if proof is None:
        call = Call(call.x.cpu(), call.timestep.cpu(), on_host(call.named), on_host(call.options))
        proof, how = _new(stub, call, sizes, key, tried_sizes)
    stub.run.proof = proof
    _check(stub, proof, sizes)
    _adopt(stub, proof, call, tried_sizes)
    if not stub.own.unet and (widths := widths_of(call)) not in stub.proofs.fitting:
        if error := misfit(stub.own, call):
            raise does_not_run(stub.own, call, error)
        stub.proofs.fitting.add(widths)
    if how is not None:
        degrees, lines = stub.setup.degrees, [f"{stub.own.name}, ComfyUI's own class, verified{how}"]
        if not degrees.pipe == degrees.sequence == degrees.tensor == 1:
            total = sum(map(len, block_lists(stub.meta).values()))
            lines = [f"{lines[0]}: {len(proof.blocks)} of {total} blocks are shared out", share_of_work(stub.own, call)]
        say("\n".join(f"Parallel DiT: {line}" for line in lines if line))
    return proof


def _new(stub: Stub, call: Call, sizes: tuple[int, ...], key: Key, tried_sizes: tuple[int, ...]) -> tuple[Proof, str]:
    """Return (the proof, from a shipped plan, an earlier process or a trial; its source as text for the report)."""
    own, numbers, times = stub.own, numbers_of(call), times_of_run(stub)
    _, sequence, bands, tensor = key

    def prove() -> Proof:
        poll = Elapsed(f"trying {own.name}, ComfyUI's own class, before its weights are loaded")
        return trial(own, call, times, poll, sequence, bands, tensor)

    lists, plan = block_lists(stub.meta), asked(call, sizes, times, sequence, bands, tensor)
    is_naive = stub.setup.degrees.naive  # plans lack a trial of naive patches
    proof, how = (None, "") if is_naive else shipped_proof(own, plan, lists)
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
    return proof, how


def _check(stub: Stub, proof: Proof, sizes: tuple[int, ...]) -> None:
    """Raise ValueError if the setup's degrees are not proven."""
    name, degrees = stub.checkpoint.path.name, stub.setup.degrees
    proof.check(degrees, name)
    if degrees.naive and proof.latent is not None and (why := proof.latent.why_uneven(sizes)):
        raise ValueError(stub.without_bands(why))
    if not proof.blocks and (proof.batch or not stub.own.unet):
        raise ValueError(f"model_name: {name} cannot run on ranks: {proof.stages}. Load it with ComfyUI's own loader.")


def _adopt(stub: Stub, proof: Proof, call: Call, tried_sizes: tuple[int, ...]) -> None:
    """Use this proof for loading the model, with this call as the example."""
    known = stub.checkpoint.built.call
    is_known = known is not None and (*known.x.shape, words_of(known)) == tried_sizes
    is_of_setup = (stub.own.blocks, stub.own.latent) == (proof.blocks, proof.latent)
    if not is_of_setup:  # an equal setup would have all calls of the run prepared again
        stub.setup = stub.setup.with_blocks(proof.blocks, proof.latent)
    if not (is_of_setup and is_known):
        example = with_tensors_told(call) if proof.options else call
        built = dataclasses.replace(built_class(stub.own), call=example)
        stub.checkpoint = dataclasses.replace(stub.checkpoint, built=built)
