"""Imports that do without some packages."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Within it these packages look as if they were not installed, but for those that have been imported before."""
    hiding = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hiding))
    try:
        yield
    finally:
        for package in hiding:
            del sys.modules[package]
