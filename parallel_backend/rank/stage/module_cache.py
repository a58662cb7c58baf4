"""A cache of module outputs that several micro-steps share: computed in the first of them, reused in the others.

A band's micro-step runs the model's whole forward. Modules that depend only on the timestep and the prompt give the same
output for all bands: modulation, whose weights (a quarter of Flux's) would be read again for each band; text refiners;
keys of the text.
"""

import functools
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from parallel_backend.families.base.family import CacheScope, name_pattern
from parallel_backend.wire.sampling import Step

from .stand_ins import STAND_INS

CAPACITY = {CacheScope.CALL: 1, CacheScope.PROMPT: 2, CacheScope.BAND: 32}
"""Calls, prompts and bands whose outputs are kept. Two prompts: positive and negative, where these are two calls."""

Outputs = dict[tuple[nn.Module, int], Any]
"""(module, number of its call within the micro-step) -> output. Some modules are called for the text and for the image."""


class ModuleCache:
    """Outputs that the modules of one rank's model gave in earlier micro-steps."""

    def __init__(self, model: nn.Module, plan: Mapping[str, CacheScope]):
        """Make the modules of `plan` (Forward.cached_modules) return cached outputs."""
        self._kept: dict[CacheScope, OrderedDict[tuple[Hashable, ...], Outputs]] = {per: OrderedDict() for per in CacheScope}
        self.current: dict[CacheScope, Outputs] = {}  # for the micro-step under way
        self.calls: Counter[nn.Module] = Counter()  # in the micro-step under way
        patterns = [(re.compile(name_pattern(name)), per) for name, per in plan.items()]
        for name, module in model.named_modules():
            per = next((per for pattern, per in patterns if pattern.fullmatch(name)), None)
            if per is not None and not isinstance(module, STAND_INS):
                module.__class__ = _with_cache(type(module))
                module.module_cache, module.cache_scope = self, per

    def begin_step(self, step: Step, whole: bool) -> None:
        """A micro-step begins. A `whole` call is one micro-step, so its outputs need not be kept for others."""
        prompt = (step.conditioning, step.entries)
        keys = {CacheScope.PROMPT: prompt, CacheScope.BAND: (*prompt, step.tokens, step.with_text)}
        if not whole:
            keys[CacheScope.CALL] = (*prompt, step.timestep.numpy().tobytes())
        self.end_step()
        for per, key in keys.items():
            kept = self._kept[per]
            self.current[per] = kept.setdefault(key, {})
            kept.move_to_end(key)
            if len(kept) > CAPACITY[per]:
                kept.popitem(last=False)

    def end_step(self) -> None:
        """The micro-step is over. Outputs of later calls are not kept."""
        self.current = {}
        self.calls.clear()

    def drop(self, conditioning: int) -> None:
        """Drop outputs computed from this conditioning, which is gone."""
        for kept in self._kept.values():
            for key in [key for key in kept if key[0] == conditioning]:
                del kept[key]

    def forget(self) -> None:
        """Drop all outputs: weights have changed, or a run is over."""
        for kept in self._kept.values():
            kept.clear()


class CachedModule:
    """Mixed into a module's class. Callers must not change its output in place."""

    module_cache: ModuleCache
    cache_scope: CacheScope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = self.module_cache.current.get(self.cache_scope)
        if known is None:
            return super().__call__(*args, **kwargs)
        call = self, self.module_cache.calls[self]
        self.module_cache.calls[self] += 1
        if call not in known:
            known[call] = super().__call__(*args, **kwargs)
        return known[call]


@functools.cache
def _with_cache(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `base` with its name, since diffusers and adapters compare class names."""
    return type(base.__name__, (CachedModule, base), {})
