"""Faults of two events, for the state machine to find: what a first one leaves, a second one meets."""

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from parallel_backend.client.conditioning_cache import ConditioningCache
from parallel_backend.client.lora import Adaptation, Deltas
from parallel_backend.client.memory_guard import MemoryGuard
from parallel_backend.client.models_on_ranks import ModelsOnRanks
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.resident_weights import ResidentWeights
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.stage.lora import Adapters
from parallel_backend.rank.stage.module_cache import ModuleCache
from parallel_backend.rank.stage.store.slots import Slots
from parallel_backend.rank.stage.store.weight_store import WeightStore


@dataclass(frozen=True)
class Plant:
    """In `method` of `owner` the text `old`, found once, becomes `new`."""

    name: str
    owner: type
    method: str
    old: str
    new: str


PLANTS = (
    Plant("modules' outputs stay after a merge", Engine, "adapted", "self.stage.module_cache.forget()", "pass"),
    Plant(
        "modules' outputs stay when their prompt goes", Engine, "drop_conditioning", "self.stage.module_cache.drop(", "int("
    ),
    Plant("a run that is given up still counts", RemoteTransformer, "discard_run", "self._memory.forget(run)", "pass"),
    Plant("keys of a cancelled run stay", RemoteTransformer, "discard_run", "self._ranks.tell(m.CloseRun(run))", "pass"),
    Plant("memory of slots stays counted when they close", Slots, "close", "self._copies.release(slot.memory)", "pass"),
    Plant(
        "a LoRA is not weighed where the last one had its strengths", Adaptation, "replace", "self._strengths = ()", "pass"
    ),
    Plant("additions stay counted after giving way", Adaptation, "drop", "self.bytes = [", "_ = ["),
    Plant("weights stay counted after giving way", ResidentWeights, "_note", "self._held = answered.result()", "pass"),
    Plant("models of ranks that were killed stay", ModelsOnRanks, "add", "if not each.model.on_ranks", "if each is None"),
    Plant(
        "a prompt too many is not dropped", ConditioningCache, "find", "self._ranks.tell(DropConditioning(dropped))", "pass"
    ),
    Plant("what was admitted before weights gave way needs no look", MemoryGuard, "gave_way", "self.refresh()", "pass"),
    Plant("a slot keeps the weights of before a merge", WeightStore, "overwrite", "self._slots.forget(group.name)", "pass"),
    Plant(
        "a LoRA keeps the scale of its first use",
        Deltas,
        "replace",
        "Rescale(tuple(same[number]",
        "Rescale(tuple(known[number]",
    ),
    Plant("modules' outputs stay from run to run", ModuleCache, "forget", "kept.clear()", "pass"),
    Plant("a merge stays on the weights", Adapters, "drop", "if self._replaced:", "if not self._replaced:"),
)


@contextlib.contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """The product with the fault. ValueError unless the old text is in the method once."""
    function = inspect.unwrap(plant.owner.__dict__[plant.method])
    source = textwrap.dedent(inspect.getsource(function))
    if (count := source.count(plant.old)) != 1:
        raise ValueError(f"plant '{plant.name}': its old text is {count} times in {plant.method}, not once")
    module = compile(source.replace(plant.old, plant.new), inspect.getfile(function), "exec")
    code = next(each for each in module.co_consts if isinstance(each, CodeType) and each.co_name == plant.method)
    sound, function.__code__ = function.__code__, code  # what decorates the method stays
    try:
        yield
    finally:
        function.__code__ = sound
