"""A cache of module outputs that several micro-steps share: computed in the first of them, reused in the others.

A band's micro-step runs the model's whole forward. Modules that depend only on the timestep and the prompt have the same
output for all bands: modulation, whose weights (a quarter of Flux's) would be read again for each band; text refiners;
keys of the text.

Outputs of a model call are kept until the next call. Others stay as long as their conditioning is in use: it was called at
this timestep or the last one. So a rank holds, for each conditioning in use, outputs for the text and the positions of the
whole latent and of its bands: once for all batch entries, and once for each entry that is called alone. Their number is not
limited, since a limit would drop the outputs that are needed next if many prompts or bands take turns.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_backend.families.base.family import CacheScope, name_pattern
from parallel_backend.wire.sampling import Step

from .stand_ins import STAND_INS

ModuleCall = tuple[nn.Module, int]
"""(module, number of its call in the micro-step). Some modules are called once for the text and once for the image."""

SIMPLE = (torch.Tensor, type(None), bool, int, float, str)
"""Types that an output may consist of to be kept at a fixed address (ModuleCache, `steady`)."""


class Outputs(dict[ModuleCall, Any]):
    """Outputs of modules in one call, for one prompt, or for one band."""

    def __init__(self, number: int):
        """`number` is unique in the cache, also over time."""
        super().__init__()
        self.number = number


class ModuleCache:
    """Outputs that the modules of one rank's model gave in earlier micro-steps."""

    def __init__(self, model: nn.Module, plan: Mapping[str, CacheScope], steady: bool = False):
        """Make the modules of `plan` (Forward.cached_modules) return cached outputs.

        `steady`: outputs of a call get the same addresses as those of the call before, from which CUDA graphs of the call's
        other bands read them (micro_step_graphs.py). Costs a copy of each output.
        """
        self._steady, self._numbers = steady, itertools.count()
        self._places: dict[tuple[Hashable, ...], Any] = {}  # by prompt, timestep's shape, module call
        self._prompt: tuple[Hashable, ...] = ()  # prompt and shape of the timestep of the micro-step under way
        self._time, self._called = float("nan"), set[int]()  # newest timestep, and conditionings called at it
        self._elsewhere = 0  # count of outputs that `_places` could not take, since they are not SIMPLE
        self._kept: dict[CacheScope, dict[tuple[Hashable, ...], Outputs]] = {per: {} for per in CacheScope}
        self.current: dict[CacheScope, Outputs] = {}  # for the micro-step under way
        self.calls: Counter[nn.Module] = Counter()  # in the micro-step under way
        patterns = [(re.compile(name_pattern(name)), per) for name, per in plan.items()]
        for name, module in model.named_modules():
            per = next((per for pattern, per in patterns if pattern.fullmatch(name)), None)
            if per is not None and not isinstance(module, STAND_INS):
                module.__class__ = _with_cache(type(module))
                module.module_cache, module.cache_scope = self, per

    def begin_step(self, step: Step, whole: bool) -> None:
        """A micro-step begins. A `whole` call is one micro-step, so outputs of scope CALL are not kept."""
        prompt = (step.conditioning, step.entries)
        keys: dict[CacheScope, tuple[Hashable, ...]] = {
            CacheScope.PROMPT: prompt,
            CacheScope.BAND: (*prompt, step.tokens, step.with_text),
        }
        if not whole:
            keys[CacheScope.CALL] = (*prompt, step.timestep.numpy().tobytes())
        self.end_step()
        self._prompt = *prompt, tuple(step.timestep.shape)
        self._note_call(step)
        for per, key in keys.items():
            kept = self._kept[per]
            if key not in kept:
                if per is CacheScope.CALL:  # a call's bands come one after another
                    kept.clear()
                kept[key] = Outputs(next(self._numbers))
            self.current[per] = kept[key]

    def _note_call(self, step: Step) -> None:
        """At a new timestep, drop outputs of conditionings that were not called at the last one."""
        if (time := float(step.timestep.max())) != self._time:
            for kept in self._kept.values():
                for key in [key for key in kept if key[0] not in self._called]:
                    del kept[key]
            self._time, self._called = time, set()
        self._called.add(step.conditioning)

    def end_step(self) -> None:
        """The micro-step is over. Outputs of modules that are called outside of micro-steps are not kept."""
        self.current = {}
        self.calls.clear()

    def drop(self, conditioning: int) -> None:
        """Drop outputs computed from this conditioning, which is gone."""
        for kept in self._kept.values():
            for key in [key for key in kept if key[0] == conditioning]:
                del kept[key]
        for key in [key for key in self._places if key[0] == conditioning]:
            del self._places[key]

    def forget(self) -> None:
        """Drop all outputs: weights have changed, or a run is over."""
        for kept in self._kept.values():
            kept.clear()
        self._places.clear()

    def keep(self, scope: CacheScope, call: ModuleCall, out: Any) -> Any:
        """Keep an output for the micro-steps that share it. Returns the output to use, which may be at another address."""
        if self._steady and scope is CacheScope.CALL:
            out = self._in_its_place((*self._prompt, *call), out)
        self.current[scope][call] = out
        return out

    def pattern(self) -> Hashable:
        """Identifies the outputs that the present micro-step reuses. Equal only if they are at the same addresses."""
        numbers = [self.current[per].number for per in (CacheScope.PROMPT, CacheScope.BAND)]
        return *numbers, frozenset(self.current.get(CacheScope.CALL, ()))

    def made(self) -> tuple[int, ...]:
        """Counts of outputs kept at new addresses. Unchanged by a micro-step that kept none."""
        return self._elsewhere, len(self._places), *(len(self.current[per]) for per in (CacheScope.PROMPT, CacheScope.BAND))

    def of_call(self) -> dict[ModuleCall, Any]:
        """Outputs of the call under way, so far. Empty for a `whole` call."""
        return dict(self.current.get(CacheScope.CALL, {}))

    def again(self, outputs: Mapping[ModuleCall, Any]) -> None:
        """The micro-step is computed once more. `outputs`: of the call, those that it is to find, as the first time."""
        self.calls.clear()
        if CacheScope.CALL in self.current:
            self.current[CacheScope.CALL].clear()
            self.current[CacheScope.CALL].update(outputs)

    def follow(self, outputs: Mapping[ModuleCall, Any]) -> None:
        """A CUDA graph has computed these outputs of the call, at their addresses of before."""
        if outputs:
            self.current[CacheScope.CALL].update(outputs)

    def _in_its_place(self, key: tuple[Hashable, ...], out: Any) -> Any:
        """`out` at the fixed address of `key`."""
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


class CachedModule(nn.Module):
    """Mixed into a module's class. Callers must not change its output in place."""

    module_cache: ModuleCache
    cache_scope: CacheScope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = self.module_cache
        outputs = cache.current.get(self.cache_scope)
        if outputs is None:
            return super().__call__(*args, **kwargs)
        call = self, cache.calls[self]
        cache.calls[self] += 1
        return outputs[call] if call in outputs else cache.keep(self.cache_scope, call, super().__call__(*args, **kwargs))


@functools.cache
def _with_cache(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `base` with the same name, since diffusers and adapters compare class names."""
    return type(base.__name__, (CachedModule, base), {})
