"""docs/modules.md: every module of the code with the first sentence of its docstring, by room.

python scripts/module_list.py           writes the page
python scripts/module_list.py --check   exits with 1 if the committed page is not the one of this code
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = ("nodes", "parallel_backend")
HEAD = """# Modules

Made by `python scripts/module_list.py` from the first sentence of each module's docstring. How the rooms belong together:
[architecture](architecture.md).
"""


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence: one before a capital letter or the paragraph's end."""
    words = text.split("\n\n", maxsplit=1)[0].split()
    for number, (word, following) in enumerate(zip(words, [*words[1:], "X"], strict=True)):
        if word.endswith(".") and not word.endswith(("..", "e.g.", "i.e.")) and not following[0].islower():
            return " ".join(words[: number + 1])
    return " ".join(words)


def docstring(path: Path) -> str:
    """ValueError if the module has none: each has a line on this page."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring.")
    return first_sentence(text)


def folders() -> list[Path]:
    return sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})


def lines() -> Iterator[str]:
    """A part for each folder, and in it a row for each module."""
    for folder in folders():
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        yield f"\n## {folder.relative_to(ROOT).as_posix()}/\n{docstring(folder / '__init__.py')}\n"
        yield from (f"- `{path.name}`: {docstring(path)}" for path in modules)


def page() -> str:
    return HEAD + "\n".join(lines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed page, and write nothing")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not the list of this code's modules: run python scripts/module_list.py")


if __name__ == "__main__":
    main()
