"""Finds the node, of ComfyUI or of another pack, that a function or a call comes from, so that refusals can name it."""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

COMFYUI = importlib.import_module("nodes")
"""ComfyUI's module `nodes`, which has its own nodes and the tables of all packs' nodes."""
SAMPLING = ("comfy.sample", "comfy.samplers")
"""Modules that call functions which nodes have put on a MODEL. Callers of these modules are not the cause of such a call."""
OURS = __name__.removesuffix(".nodes.ui.other_nodes")
SEPARATORS = re.compile(r"[./\\]")
"""The separators in a module's name."""
SHOWN = 3
"""Maximum number of nodes that a text names if several nodes share a function."""


@dataclass(frozen=True)
class OtherNode:
    """A node under the name that users see."""

    title: str
    pack: str
    """The pack's folder in custom_nodes. Empty for ComfyUI's own nodes."""

    def __str__(self) -> str:
        return f"{self.title} ({self.pack})" if self.pack else self.title


def nodes_of(source: Any) -> list[OtherNode]:
    """Return the nodes that a function, or an object with methods, comes from. Empty: none is known.

    That is the node in whose class the function was defined, or else all nodes whose functions use it by name.
    """
    source = definition(source)
    module, first = source.__module__, source.__qualname__.partition(".")[0]
    of_the_pack = [(name, kind) for name, kind in _kinds() if _pack(kind.__module__) == _pack(module)]
    for name, kind in of_the_pack:
        if any(base.__module__ == module and base.__name__ == first for base in kind.__mro__):
            return [_node(name, kind)]
    target = getattr(sys.modules.get(module), first, None)
    if target is None:
        return []
    return [_node(name, kind) for name, kind in of_the_pack if any(_uses(each, first, target) for each in _functions(kind))]


def definition(source: Any) -> FunctionType | type:
    """Return the object that a module defines: the function inside a method or partial function, or the class of an
    object."""
    while isinstance(source, functools.partial):
        source = source.func
    source = getattr(source, "__func__", source)
    return source if isinstance(source, (FunctionType, type)) else type(source)


def name_of(source: Any) -> str:
    """Return the name of a function, a method, a partial function or a class, or of the class of another object.

    It has only the last part of the module's name, because ComfyUI names a pack's modules by the pack's folder.
    """
    defined = definition(source)
    return f"{SEPARATORS.split(defined.__module__)[-1]}.{defined.__qualname__}"


def is_known(name: re.Pattern[str], function: Callable[..., Any]) -> bool:
    """Return whether the name of the function or class, as `name_of` returns it, matches `name`."""
    return name.fullmatch(name_of(function)) is not None


def nodes_that_set(entry: str) -> list[OtherNode]:
    """Return the nodes with a function that sets this entry of transformer_options, directly or by a method of
    ModelPatcher."""

    def sets(function: FunctionType) -> bool:
        codes = list(_codes(function.__code__))
        strings = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
        return strings >= {"transformer_options", entry} or any(f"set_model_{entry}" in code.co_names for code in codes)

    return [_node(name, kind) for name, kind in _kinds() if any(map(sets, _functions(kind)))]


def calling_nodes() -> list[OtherNode]:
    """The node that causes the current call: its function is on the stack, or a function that it has put on the MODEL.

    Empty: no other node causes the call. Several: see `nodes_of`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (module := frame.f_globals.get("__name__", "")) not in SAMPLING:
        if not module.startswith(("torch", "comfy.", "unittest", f"{OURS}.")):
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            owner = owner if isinstance(owner, type) else type(owner)
            for name, kind in _kinds():
                defined_here = kind.__module__ == module
                if owner is kind or (
                    defined_here and any(frame.f_code in _codes(each.__code__) for each in _functions(kind))
                ):
                    return [_node(name, kind)]
            function = frame.f_globals.get(frame.f_code.co_name)
            if getattr(function, "__code__", None) is frame.f_code and (nodes := nodes_of(function)):
                return nodes
        frame = frame.f_back
    return []


def named(nodes: list[OtherNode]) -> str:
    """Return the nodes' names for a text; empty if there is no node, or if too many of ComfyUI's nodes are possible."""
    if len(nodes) <= SHOWN:
        return " or ".join(map(str, nodes))
    return f"a node of {nodes[0].pack}" if nodes[0].pack else ""


def _kinds() -> Iterator[tuple[str, type]]:
    """Yield (id, class) of all nodes except this pack's nodes."""
    kinds = COMFYUI.NODE_CLASS_MAPPINGS.items()
    return ((name, kind) for name, kind in kinds if isinstance(kind, type) and not kind.__module__.startswith(f"{OURS}."))


def _node(name: str, kind: type) -> OtherNode:
    parent, _, pack = getattr(kind, "RELATIVE_PYTHON_MODULE", "").partition(".")
    return OtherNode(COMFYUI.NODE_DISPLAY_NAME_MAPPINGS.get(name) or name, pack if parent == "custom_nodes" else "")


def _pack(module: str) -> str:
    """Return the first part of a module's name, which all modules of a pack share."""
    return module.partition(".")[0]


def _functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of a node's class and of its base classes in the same module."""
    for base in kind.__mro__:
        if base.__module__ == kind.__module__:
            for value in vars(base).values():
                function = getattr(value, "__func__", value)  # class methods and static methods have a `__func__`
                if isinstance(function, FunctionType):
                    yield function


def _uses(function: FunctionType, name: str, target: Any, seen: frozenset[FunctionType] = frozenset()) -> bool:
    """Return whether the function, or a function of its module that it calls, uses `target` by this name."""
    names = {each for code in _codes(function.__code__) for each in code.co_names}
    if name in names and function.__globals__.get(name, target) is target:
        return True
    others = (function.__globals__.get(each) for each in names)
    return any(
        _uses(each, name, target, seen | {function})
        for each in others
        if isinstance(each, FunctionType) and each.__module__ == function.__module__ and each not in seen
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
