"""Key maps: which tensor of a checkpoint in the original layout has the values of which parameter of diffusers' class."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from parallel_backend.core.spans import Span

from ..base.file_layout import Source

BOTH = ("weight", "bias")
WEIGHT = ("weight",)
Parameters = Iterable[str] | Mapping[str, str]
"""The parameters that a module has; a mapping (diffusers' name -> original name) where their names differ."""


@dataclass(frozen=True)
class KeyMap:
    """Collects the sources of a class's parameters, with a short call for each kind of layer."""

    sources: dict[str, Source] = field(default_factory=dict)
    """Parameter of diffusers' class -> its source."""

    target: str = ""
    """Prefix of the module names of diffusers' class."""

    source: str = ""
    """Prefix of the module names in the original layout."""

    def inside(self, target: str, source: str) -> "KeyMap":
        """The same collection, with these prefixes appended to those of this map."""
        return KeyMap(self.sources, self.target + target, self.source + source)

    def each(self, target: str, source: str, count: int) -> Iterator["KeyMap"]:
        """For every block of a list, in order: the same collection, inside the block."""
        return (self.inside(f"{target}.{index}.", f"{source}.{index}.") for index in range(count))

    def copy(self, names: Mapping[str, str], parameters: Parameters = BOTH) -> None:
        """Modules that are one module in both layouts: diffusers' name -> original name."""
        for target, source in names.items():
            for ours, theirs in _pairs(parameters):
                self.sources[f"{self.target}{target}.{ours}"] = Source(f"{self.source}{source}.{theirs}")

    def same(self, *names: str, parameters: Parameters = BOTH) -> None:
        """Modules that are one module in both layouts and have the same name."""
        self.copy({name: name for name in names}, parameters)

    def split(self, source: str, rows: Mapping[str, int], parameters: Parameters = BOTH) -> None:
        """An original module that is several modules in diffusers: their names -> numbers of rows, in order."""
        start = 0
        for target, count in rows.items():
            for ours, theirs in _pairs(parameters):
                self.sources[f"{self.target}{target}.{ours}"] = Source(
                    f"{self.source}{source}.{theirs}", Span(start, start + count)
                )
            start += count

    def tensor(self, target: str, source: str | None = None) -> None:
        """A parameter outside of layers. `source`: its original name, if it differs."""
        self.sources[self.target + target] = Source(self.source + (source or target))


def _pairs(parameters: Parameters) -> Iterable[tuple[str, str]]:
    return parameters.items() if isinstance(parameters, Mapping) else ((name, name) for name in parameters)
