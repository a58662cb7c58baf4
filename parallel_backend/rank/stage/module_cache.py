"""Caches outputs of modules that the bands of a call share: the first band computes them, the others reuse them.

A band's micro-step runs the model's whole forward. Modules that depend only on the timestep and the prompt have the same
output for all bands: modulation, whose weights (a quarter of Flux's) would be read again for each band; text refiners; keys
of the text. Outputs are kept until the next call. Those that only depend on the prompt are kept for all of its calls.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_backend.own_class.cuts.forms import Form, put_form
from parallel_backend.own_class.cuts.shared_outputs import modules_of
from parallel_backend.wire.sampling import Step

ModuleCall = tuple[nn.Module, int]
"""(module, index of its call within the micro-step). Some modules are called once for the text and once for the image."""

SIMPLE = (torch.Tensor, type(None), bool, int, float, str)
"""Types of outputs that can be kept at a fixed address (ModuleCache, `steady`)."""


@dataclass
class OfPrompt:
    """The output of a module that only depends on the prompt, see Adapter.of_prompt."""

    time: bytes
    """Bytes of the timestep for which it was first computed."""
    out: torch.Tensor
    is_proven: bool = False
    """Whether it was the same at another timestep."""


class ModuleCache:
    """Outputs that the modules of a rank's model returned in earlier micro-steps of the call."""

    def __init__(self, model: nn.Module, names: Collection[str], of_prompt: Collection[str] = (), steady: bool = False):
        """Make the modules with these names (OwnLatent.shared) return cached outputs. `of_prompt`: see Adapter.

        `steady`: give a call's outputs the same addresses as in the previous call, from which CUDA graphs of the call's
        other bands read them (micro_step_graphs.py). This costs a copy of each output.
        """
        self._steady = steady
        self._places: dict[tuple[Hashable, ...], Any] = {}  # by prompt, timestep's shape, module call
        self._prompt: tuple[Hashable, ...] = ()  # prompt and shape of the timestep of the micro-step in progress
        self._elsewhere = 0  # count of outputs that `_places` could not take, since they are not SIMPLE
        self._call: tuple[Hashable, ...] | None = None  # prompt and timestep of `outputs`
        self.outputs: dict[ModuleCall, Any] = {}
        """The cached outputs of the newest call."""
        self.is_open = False
        """Whether a band's micro-step is in progress."""
        self.in_step = False
        """Whether a micro-step is in progress."""
        self.calls: Counter[nn.Module] = Counter()  # in the micro-step in progress
        # A graph would have to tell whether such a module was computed.
        self.of_prompt = {model.get_submodule(name) for name in of_prompt if name in names and not steady}
        """Modules whose outputs are kept for a prompt. A module that turns out to depend on the timestep is removed."""
        self._texts: dict[tuple[Hashable, ...], dict[ModuleCall, OfPrompt]] = {}  # by prompt
        self._time = b""  # of the micro-step in progress
        for module in modules_of(model, names).values():
            put_form(CachedModule, module)
            vars(module)["module_cache"] = self

    def begin_step(self, step: Step, whole: bool) -> None:
        """Begin a micro-step. `whole`: it computes the whole call, so nothing is cached."""
        prompt = step.conditioning, step.entries
        self._prompt, self._time = (*prompt, tuple(step.timestep.shape)), step.timestep.numpy().tobytes()
        self.in_step = True
        if whole:
            return
        call = *prompt, self._time
        if call != self._call:  # a call's bands come one after another
            self._call = call
            self.outputs.clear()
        self.is_open = True

    def end_step(self) -> None:
        """End the micro-step. Outputs of modules called between micro-steps are not cached."""
        self.is_open = self.in_step = False
        self.calls.clear()

    def drop(self, conditioning: int) -> None:
        """Drop the outputs that were computed from this conditioning."""
        if self._call is not None and self._call[0] == conditioning:
            self._forget_call()
        for kept in self._places, self._texts:
            for key in [key for key in kept if key[0] == conditioning]:
                del kept[key]

    def forget(self) -> None:
        """Drop all outputs, because weights have changed or a run has ended."""
        self._forget_call()
        self._places.clear()
        self._texts.clear()

    def _forget_call(self) -> None:
        self._call = None
        self.outputs.clear()

    def keep(self, call: ModuleCall, out: Any) -> Any:
        """Cache an output for the call's other bands. Returns the output to use, which may have another address."""
        if self._steady:
            out = self._in_its_place((*self._prompt, *call), out)
        self.outputs[call] = out
        return out

    def of_text(self, call: ModuleCall, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output of a module of `of_prompt`. It is computed until two timesteps have given bitwise equal outputs."""
        texts = self._texts.setdefault(self._prompt[:2], {})
        known = texts.get(call)
        if known is not None and known.is_proven:
            return known.out
        out = compute()
        if known is None:
            texts[call] = OfPrompt(self._time, out)
        elif known.time != self._time:
            known.is_proven = torch.equal(known.out, out)
            if not known.is_proven:
                self.of_prompt.discard(call[0])
        return out

    def pattern(self) -> Hashable:
        """Identifies the outputs that the present micro-step reuses. Equal only if they are at the same addresses."""
        return frozenset(self.of_call())

    def made(self) -> tuple[int, ...]:
        """Counts of the outputs that were cached at new addresses. A micro-step that cached none does not change them."""
        return self._elsewhere, len(self._places)

    def of_call(self) -> dict[ModuleCall, Any]:
        """Return the cached outputs of the call in progress. Empty if the call is `whole`."""
        return dict(self.outputs) if self.is_open else {}

    def again(self, outputs: Mapping[ModuleCall, Any]) -> None:
        """Prepare for computing the micro-step again. `outputs`: the cached outputs of the call that it found the first
        time."""
        self.calls.clear()
        if self.is_open:
            self.outputs = dict(outputs)

    def follow(self, outputs: Mapping[ModuleCall, Any]) -> None:
        """Record that a CUDA graph has computed these outputs of the call, at their previous addresses."""
        self.outputs.update(outputs)

    def _in_its_place(self, key: tuple[Hashable, ...], out: Any) -> Any:
        """`out`, copied to the fixed address of `key`."""
        if not all(isinstance(leaf, SIMPLE) for leaf in tree_leaves(out)):
            self._elsewhere += 1
            return out
        if key not in self._places:
            self._places[key] = tree_map_only(torch.Tensor, torch.clone, out)
            return self._places[key]
        for place, value in zip(tree_leaves(self._places[key]), tree_leaves(out), strict=True):
            if isinstance(value, torch.Tensor):
                assert place.shape == value.shape, "outputs of a module for one prompt have different sizes"
                place.copy_(value)
        return self._places[key]


class CachedModule(Form):
    """A module that returns cached outputs. Callers must not change them in place."""

    module_cache: ModuleCache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, compute = self.module_cache, functools.partial(super().__call__, *args, **kwargs)
        of_prompt = cache.in_step and self in cache.of_prompt
        if not (cache.is_open or of_prompt):
            return compute()
        call = self, cache.calls[self]
        cache.calls[self] += 1
        if cache.is_open and call in cache.outputs:
            return cache.outputs[call]
        out = cache.of_text(call, compute) if of_prompt else compute()
        return cache.keep(call, out) if cache.is_open else out
