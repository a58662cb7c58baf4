"""What a mutant is: data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One small change to the product: in `file`, `old` becomes `new`. The name says what is wrong then."""

    name: str
    file: str  # below the repository's folder
    old: str  # found exactly once in the file
    new: str
    tests: tuple[str, ...]  # of the file's room: arguments of pytest
    wider: tuple[str, ...] = ()  # what the default tier runs beside them
    tier: str = "quick"  # by which it must be caught: quick or default

    @property
    def room(self) -> str:
        """The first two folders of its file."""
        return "/".join(self.file.split("/")[:-1][:2])

    def applied(self, text: str) -> str:
        """The file's text with the change. ValueError unless the old text is there exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutant '{self.name}': its old text is {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)
