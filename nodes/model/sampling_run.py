"""What a MODEL on ranks is sampled with, from the beginning of a sampling run to its end."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

import comfy.model_patcher

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.shortfalls import SecondTry
from parallel_backend.processes.pool import DeviceFull

from ..ui.node_text import say
from .lora import Patch
from .step_cache import SamplingCache

log = logging.getLogger(__name__)
T = TypeVar("T")


def tell(text: str) -> None:
    """Tell the user, on the node and in the console."""
    log.warning("Parallel DiT: %s", text)
    say(f"Parallel DiT: {text}")


@dataclass
class SamplingRun:
    """What a RemoteDiffusionModel is sampled with, from a patcher's pre_run on. Its patchers (clones) all share the model.

    The patches are those of the patcher. `bypass_patches`: its LoRAs in bypass mode, as patches by key.
    """

    patcher: Callable[[], comfy.model_patcher.ModelPatcher | None] = lambda: None
    """Weak reference to the patcher."""
    patches: dict[str, list[Patch]] = field(default_factory=dict)
    bypass_patches: dict[str, list[Patch]] = field(default_factory=dict)
    hook_patches: dict[Any, dict[str, list[Patch]]] = field(default_factory=dict)
    patches_uuid: UUID | None = None
    """Stands for `patches` and `bypass_patches`."""
    cache: SamplingCache | None = None
    idle: str | None = None
    """The message that the user got about replicas with nothing to do."""
    loaded: Callable[[], RemoteTransformer | None] = lambda: None
    """Weak reference to the model on the ranks that answered the last call."""
    loads: int = 0
    """How often `loaded` became another one. More than once: another MODEL takes the ranks in between."""
    answered: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Shape of one batch entry's latent -> number of entries that calls outside of bands had."""
    second_try: SecondTry = field(default_factory=lambda: SecondTry(tell))

    def tried(self, load: Callable[[], RemoteTransformer], work: Callable[[RemoteTransformer], T]) -> T:
        """`work(load())`. If a device of that model runs out of memory in it, both are done again, once in the run."""
        while True:
            model = load()
            try:
                return work(model)
            except DeviceFull as error:
                if not self._tries_again(model, error):
                    raise

    def _tries_again(self, model: RemoteTransformer, error: DeviceFull) -> bool:
        """`model`, which answered the run's calls, ran out of memory. Whether to try again."""
        if not self.second_try.allows(model, error):
            return False
        self.loads = 0  # the next one replaces no other MODEL's
        if self.cache is not None:
            self.cache.restart()  # it goes by the conditionings' numbers on the ranks, which begin anew
        return True
