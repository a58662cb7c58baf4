"""Imports as if some packages were not installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def blocked_imports(*packages: str) -> Iterator[None]:
    """Within it these packages cannot be imported. Packages that were imported before stay."""
    blocked = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))
    try:
        yield
    finally:
        for package in blocked:
            del sys.modules[package]
