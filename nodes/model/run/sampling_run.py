"""State of a MODEL on ranks from the beginning of a sampling run to its end."""

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import comfy.model_patcher
import torch

from parallel_backend.client.lost_ranks import FurtherTries
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.built.built_class import Counted
from parallel_backend.own_class.plans.proof import Proof
from parallel_backend.processes.pool import Poll

from ...ui.node_text import tell
from ..lora.patch_trial import Patch
from .step_cache import SamplingCache

NO_CALL: tuple[float, Mapping[str, Any]] = (0.0, {})


@dataclass(frozen=True)
class CallShape:
    """The properties of a model call that determine its seconds."""

    latent: tuple[int, ...]
    """Shape of the (first) latent, [B, C, (T,) H, W], with the call's batch entries."""
    text_tokens: int


def why_not_in_bands(proof: Proof, tokens: Counted) -> str:
    """Return why calls with these tokens cannot run in bands. Empty: they can."""
    if proof.latent is None:
        return proof.bands
    uncounted = proof.latent.layout and tokens.references < 1
    return "tokens of its references cannot be counted" if uncounted else ""


@dataclass
class SamplingRun:
    """State of a RemoteDiffusionModel since `pre_run` of a patcher. All clones of a patcher share the model, so the patches
    here are those of the clone that runs. `bypass_patches`: LoRAs in bypass mode, as patches by key."""

    patcher: Callable[[], comfy.model_patcher.ModelPatcher | None] = lambda: None
    """Weak reference to the patcher."""
    patches: dict[str, list[Patch]] = field(default_factory=dict)
    bypass_patches: dict[str, list[Patch]] = field(default_factory=dict)
    hook_patches: dict[Any, dict[str, list[Patch]]] = field(default_factory=dict)
    patches_uuid: UUID | None = None
    """Stands for `patches` and `bypass_patches`."""
    cache: SamplingCache | None = None
    head_strengths: tuple[float, ...] = ()
    """Strengths of the heads in the present call, if the patches have a PDD acceleration LoRA, see head_bank.py."""
    told_of_idle: bool = False
    """Whether the user has been told of idle replicas."""
    loaded: Callable[[], RemoteTransformer | None] = lambda: None
    """Weak reference to the model on the ranks that answered the last call."""
    of_setup: Setup | None = None
    """Setup of the model `loaded`."""
    poll: Poll = lambda: None
    """Called while a call of that model is waited for."""
    calls: Counter[CallShape] = field(default_factory=Counter)
    """Number of calls outside of bands that the ranks have answered."""
    began: float | None = None
    """When the first of these calls began, by time.perf_counter."""
    ended: float = 0.0
    """When the last of these calls ended."""
    steps: int = 0
    """Number of the sampler's steps, from a call's transformer_options. 0: unknown."""
    whole_calls: dict[Any, Counted] | None = None
    """Shapes of the conditioning of calls that were tried for bands (own_calls.shapes) -> the call's numbers of tokens.
    None: the run has no bands."""
    unproven_bands: str = ""
    """Why bands of those calls are not proven. Empty: they are."""
    proof: Proof | None = None
    """Proof of the last call with the whole latent."""
    prepared: dict[Hashable, Any] = field(default_factory=dict)
    """Key of calls -> their PreparedCall (call/prepared_call.py)."""
    lines: list[str] = field(default_factory=list)
    """Lines below the run's time on the sampler's node. Texts on a node replace each other, so some were shown before."""
    tries: FurtherTries = field(init=False)
    """Further tries after ranks were lost."""
    before: Setup | None = None
    """The setup before the first loss of a device, for which the run's calls were tried. None: no device was lost."""
    call: tuple[float, Mapping[str, Any]] = NO_CALL
    """The last model call: its start time by time.perf_counter, and its transformer_options."""
    _lost: tuple[float, str] | None = None
    """The call to be repeated: when it first began, and its step. None: there is none."""

    def __post_init__(self) -> None:
        self.tries = FurtherTries(self.tell)

    @functools.cached_property
    def patches_name(self) -> tuple[Any, ...] | None:
        """A key that distinguishes the run's set of patches from others. None: there are no patches."""
        is_patched = self.patches or self.bypass_patches or self.hook_patches
        return (self.patches_uuid, *self.hook_patches) if is_patched else None

    def tell(self, text: str) -> None:
        """Tell the user, on the node and in the console, and store the text for the end of the run."""
        tell(text)
        self.lines.append(text)

    def note(self, text: str) -> None:
        """Keep a line for the end of the run, once."""
        if text not in self.lines:
            self.lines.append(text)

    def answers(self, model: RemoteTransformer, setup: Setup, poll: Poll) -> None:
        """Record the model that answers the next calls, and its `poll`."""
        self.loaded, self.of_setup, self.poll = weakref.ref(model), setup, poll

    @contextlib.contextmanager
    def counted(self, call: CallShape, steps: int) -> Iterator[None]:
        """Context of a call outside of bands, from a sampler with `steps` steps: counts and times it."""
        if self.began is None:
            self.began = time.perf_counter()
        try:
            yield
        except BaseException:  # Cancel too: what is tried again is counted from there on
            self.calls.clear()
            self.began = None
            raise
        self.tell_again()
        self.calls[call] += 1
        self.ended, self.steps = time.perf_counter(), steps

    @property
    def step(self) -> str:
        """The sampler's step in the last model call: "step 17 of 20"; "a step" if the call does not say."""
        options = self.call[1]
        sigmas, sigma = options.get("sample_sigmas", ()), options.get("sigmas")
        if sigma is None or len(sigmas) < 2:
            return "a step"
        above = int((torch.as_tensor(sigmas).cpu() > float(sigma.max()) * (1 + 1e-6)).sum())
        return f"step {min(above + 1, len(sigmas) - 1)} of {len(sigmas) - 1}"

    def lost(self) -> None:
        """Record that the ranks are lost, and that the last call will be repeated."""
        self._lost = self._lost or (self.call[0], self.step)
        if self.cache is not None:
            self.cache.restart()  # it goes by the conditionings' numbers on the ranks, which begin anew

    def tell_again(self) -> None:
        """To be called when a call is answered: tells the user if it had to be repeated."""
        if self._lost is not None:
            (began, step), self._lost = self._lost, None
            self.tell(f"{step} was computed again, {time.perf_counter() - began:.1f} s")
