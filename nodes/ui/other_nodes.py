"""Which node, of ComfyUI or of another pack, a function or a call comes from: what is refused is refused by that name."""

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

COMFYUI = importlib.import_module("nodes")
"""ComfyUI's module `nodes`, with its nodes and the tables of all packs' nodes."""
SAMPLING = ("comfy.sample", "comfy.samplers")
"""Modules that call what nodes have put on a MODEL. Whoever called them is not to blame for what these do."""
OURS = __name__.removesuffix(".nodes.ui.other_nodes")
SEPARATORS = re.compile(r"[./\\]")
"""Of the parts of a module's name."""
SHOWN = 3
"""Most nodes that are named where several have a function in common."""


@dataclass(frozen=True)
class OtherNode:
    """A node as its users know it."""

    id: str
    title: str
    pack: str
    """Folder of the pack in custom_nodes. Empty: the node is ComfyUI's own."""

    def __str__(self) -> str:
        return f"{self.title} ({self.pack})" if self.pack else self.title


def nodes_of(source: Any) -> list[OtherNode]:
    """The nodes that a function, or an object with methods, comes from. Empty: none is known.

    It is the node in whose class the function was defined; else those whose own functions use it by name.
    """
    source = definition(source)
    module, first = source.__module__, source.__qualname__.partition(".")[0]
    near = [(name, kind) for name, kind in _kinds() if _pack(kind.__module__) == _pack(module)]
    for name, kind in near:
        if any(base.__module__ == module and base.__name__ == first for base in kind.__mro__):
            return [_node(name, kind)]
    target = getattr(sys.modules.get(module), first, None)
    if target is None:
        return []
    return [_node(name, kind) for name, kind in near if any(_uses(each, first, target) for each in _functions(kind))]


def definition(source: Any) -> FunctionType | type:
    """The function of a method or of a partial function, the class of an object: what stands in a module."""
    while isinstance(source, functools.partial):
        source = source.func
    source = getattr(source, "__func__", source)
    return source if isinstance(source, (FunctionType, type)) else type(source)


def name_of(source: Any) -> str:
    """Name of a function, a method, a partial function or a class, or of the class of another object.

    Of its module only the last part is in it: ComfyUI names a pack's modules by the folder that it is in.
    """
    made = definition(source)
    return f"{SEPARATORS.split(made.__module__)[-1]}.{made.__qualname__}"


def nodes_that_set(entry: str) -> list[OtherNode]:
    """The nodes one of whose functions sets this entry of transformer_options, or has ComfyUI's ModelPatcher set it."""

    def sets(function: FunctionType) -> bool:
        codes = list(_codes(function.__code__))
        words = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
        return words >= {"transformer_options", entry} or any(f"set_model_{entry}" in code.co_names for code in codes)

    return [_node(name, kind) for name, kind in _kinds() if any(map(sets, _functions(kind)))]


def calling_nodes() -> list[OtherNode]:
    """The node for which the current call is made: its own function is under way, or one that it has put on the MODEL.

    Empty: the call is made for no other node. Several: see `nodes_of`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (module := frame.f_globals.get("__name__", "")) not in SAMPLING:
        if not module.startswith(("torch", "comfy.", "unittest", f"{OURS}.")):
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            owner = owner if isinstance(owner, type) else type(owner)
            for name, kind in _kinds():
                own = kind.__module__ == module and any(frame.f_code in _codes(each.__code__) for each in _functions(kind))
                if owner is kind or own:
                    return [_node(name, kind)]
            function = frame.f_globals.get(frame.f_code.co_name)
            if getattr(function, "__code__", None) is frame.f_code and (found := nodes_of(function)):
                return found
        frame = frame.f_back
    return []


def named(found: list[OtherNode]) -> str:
    """In words. Empty if there is none, or if there are too many to say which it was."""
    if len(found) <= SHOWN:
        return " or ".join(map(str, found))
    return f"a node of {found[0].pack}" if found[0].pack else ""


def _kinds() -> Iterator[tuple[str, type]]:
    """The nodes that are not our own, by id."""
    kinds = COMFYUI.NODE_CLASS_MAPPINGS.items()
    return ((name, kind) for name, kind in kinds if isinstance(kind, type) and not kind.__module__.startswith(f"{OURS}."))


def _node(name: str, kind: type) -> OtherNode:
    parent, _, pack = getattr(kind, "RELATIVE_PYTHON_MODULE", "").partition(".")
    return OtherNode(name, COMFYUI.NODE_DISPLAY_NAME_MAPPINGS.get(name) or name, pack if parent == "custom_nodes" else "")


def _pack(module: str) -> str:
    """What the modules of a pack have in common."""
    return module.partition(".")[0]


def _functions(kind: type) -> Iterator[FunctionType]:
    """Those of a node's class, with those that it has of others in its module."""
    for base in kind.__mro__:
        if base.__module__ == kind.__module__:
            for value in vars(base).values():
                function = getattr(value, "__func__", value)  # of a class method, of a static one
                if isinstance(function, FunctionType):
                    yield function


def _uses(function: FunctionType, name: str, target: Any, seen: frozenset[FunctionType] = frozenset()) -> bool:
    """Whether the function, or one of its module that it calls, has a use for `target`, by this name."""
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
    """The code of a function, and of those in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
