"""Imports as if some packages were not installed, or torch had no compiler."""

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


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within it torch's compiler cannot be imported, and exempts no function from compilation.

    diffusers imports it for such exemptions alone. With it a rank imports twice as much, for four seconds in place of two.
    What compiles blocks imports it later (rank/stage/compile.py), and compiles none of those functions.
    """
    import torch.compiler

    def keep(function: Any = None, *_arguments: Any, **_named: Any) -> Any:
        return (lambda each: each) if function is None else function

    disable, torch.compiler.disable = torch.compiler.disable, keep
    try:
        with blocked_imports("torch._dynamo"):
            yield
    finally:
        torch.compiler.disable = disable
