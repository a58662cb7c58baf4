"""Key maps in few words: which tensor of a checkpoint in original layout has the values of which parameter of diffusers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parallel_backend.core.spans import Span
from parallel_backend.families.base.family import Source

BOTH = ("weight", "bias")


@dataclass(frozen=True)
class KeyMap:
    """Collects the sources of a class's parameters, a few words for each kind of layer.

    In all methods `parameters` are those that a module has; a mapping (diffusers' -> original) where their names differ.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    """Parameter of diffusers' class -> its source."""

    target: str = ""
    """Prefix of the module names of diffusers' class."""

    source: str = ""
    """Prefix of the module names in the original layout."""

    def inside(self, target: str, source: str) -> "KeyMap":
        """The same collection, with these prefixes behind its own."""
        return KeyMap(self.sources, self.target + target, self.source + source)

    def copy(
        self, names: Mapping[str, str], parameters: Iterable[str] | Mapping[str, str] = BOTH, swap_halves: bool = False
    ) -> None:
        """Modules that are one in both layouts: diffusers' name -> original name. `swap_halves`: see Source."""
        for target, source in names.items():
            for ours, theirs in _pairs(parameters):
                self.sources[f"{self.target}{target}.{ours}"] = Source(
                    f"{self.source}{source}.{theirs}", swap_halves=swap_halves
                )

    def same(self, *names: str, parameters: Iterable[str] | Mapping[str, str] = BOTH) -> None:
        """Modules that are one in both layouts, and have one name."""
        self.copy({name: name for name in names}, parameters)

    def split(self, source: str, rows: Mapping[str, int], parameters: Iterable[str] | Mapping[str, str] = BOTH) -> None:
        """An original module that is several in diffusers: name -> number of its rows, in order."""
        start = 0
        for target, count in rows.items():
            for ours, theirs in _pairs(parameters):
                self.sources[f"{self.target}{target}.{ours}"] = Source(
                    f"{self.source}{source}.{theirs}", Span(start, start + count)
                )
            start += count

    def tensor(self, target: str, source: str | None = None, flat: bool = False) -> None:
        """A parameter of no layer. `source`: its original name, if that is another one. `flat`: see Source."""
        self.sources[self.target + target] = Source(self.source + (source or target), flat=flat)


def _pairs(parameters: Iterable[str] | Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return parameters.items() if isinstance(parameters, Mapping) else ((name, name) for name in parameters)
