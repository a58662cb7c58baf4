"""Imports as if some packages were not installed."""

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def blocked_imports(*packages: str) -> Iterator[None]:
    """Within it these packages cannot be imported. Packages that were imported before stay."""
    blocked = [package for package in packages if package not in sys.modules]
    modules: MutableMapping[str, Any] = sys.modules
    modules.update(dict.fromkeys(blocked))  # None in the place of a module makes its import fail
    try:
        yield
    finally:
        for package in blocked:
            del sys.modules[package]
