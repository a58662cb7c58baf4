"""Recipes in few words: which of diffusers' parameters comes from which tensor of a checkpoint in original layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parallel_backend.core.spans import Span
from parallel_backend.families.base.family import Source

BOTH = ("weight", "bias")


@dataclass(frozen=True)
class KeyMap:
    """Collects `sources`. Module names are put behind the prefixes `target` (diffusers) and `source` (original).

    `parameters`: the parameters that a module has; a mapping where their names differ (diffusers' -> original).
    """

    sources: dict[str, Source] = field(default_factory=dict)
    target: str = ""
    source: str = ""

    def inside(self, target: str, source: str) -> "KeyMap":
        """The same collection, for modules inside these two."""
        return KeyMap(self.sources, self.target + target, self.source + source)

    def copy(
        self, names: Mapping[str, str], parameters: Iterable[str] | Mapping[str, str] = BOTH, swap_halves: bool = False
    ) -> None:
        """diffusers module -> original module, its parameters as they are (or with their halves exchanged)."""
        for target, source in names.items():
            for ours, theirs in _pairs(parameters):
                self.sources[f"{self.target}{target}.{ours}"] = Source(
                    f"{self.source}{source}.{theirs}", swap_halves=swap_halves
                )

    def same(self, *names: str, parameters: Iterable[str] | Mapping[str, str] = BOTH) -> None:
        """Modules that have one name in both layouts."""
        self.copy({name: name for name in names}, parameters)

    def split(self, source: str, rows: Mapping[str, int], parameters: Iterable[str] | Mapping[str, str] = BOTH) -> None:
        """One original module -> several of diffusers', each so many rows of it, in order."""
        start = 0
        for target, count in rows.items():
            for ours, theirs in _pairs(parameters):
                self.sources[f"{self.target}{target}.{ours}"] = Source(
                    f"{self.source}{source}.{theirs}", Span(start, start + count)
                )
            start += count

    def tensor(self, target: str, source: str | None = None) -> None:
        """A parameter that belongs to no layer. `source`: its original name, where that is another one."""
        self.sources[self.target + target] = Source(self.source + (source or target))


def _pairs(parameters: Iterable[str] | Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return parameters.items() if isinstance(parameters, Mapping) else ((name, name) for name in parameters)
