"""Faults of two events, for the state machine to find: what a first one leaves, a second one meets."""

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from parallel_backend.client.conditioning_cache import ConditioningCache
from parallel_backend.client.models_on_ranks import ModelsOnRanks
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.resident_weights import ResidentWeights
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.stage.lora import Adapters


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
    Plant("keys of a cancelled run stay", RemoteTransformer, "discard_run", "self._ranks.tell(m.CloseRun(run))", "pass"),
    Plant("weights stay counted after giving way", ResidentWeights, "_note", "self._held = answered.result()", "pass"),
    Plant("models of ranks that were killed stay", ModelsOnRanks, "add", "if not each.model.on_ranks", "if each is None"),
    Plant(
        "a prompt too many is not dropped", ConditioningCache, "find", "self._ranks.tell(DropConditioning(dropped))", "pass"
    ),
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
