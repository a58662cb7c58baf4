"""What host_names.py looks for in Python code: keys of tables, names of patches, functions that are put on a MODEL."""

import ast
import re

PATCH = re.compile(r"[a-z0-9_]+_patch")
"""A native model hands the name of a patch on as an argument: Cosmos' blocks."""
PUTS = re.compile(r"set_model_(sampler_\w+_function|unet_function_wrapper|denoise_mask_function)|add_wrapper(_with_key)?")
"""Methods of ModelPatcher that take a function which looks at predictions."""


class PutFunctions(ast.NodeVisitor):
    """Finds the functions of a module that it puts on a MODEL."""

    def __init__(self, module: str):
        self.found: set[str] = set()
        self._names, self._local = [module], [set[str]()]

    def _inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        local = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
        in_function = isinstance(node, ast.FunctionDef)
        self._names += [node.name, "<locals>"] if in_function else [node.name]
        self._local.append(local if in_function else set())
        self.generic_visit(node)
        self._local.pop()
        del self._names[-2 if in_function else -1 :]

    visit_ClassDef = visit_FunctionDef = _inside

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and PUTS.fullmatch(node.func.attr):
            for each in node.args:
                if isinstance(each, ast.Lambda):
                    self.found.add(".".join([*self._names, "<lambda>"]))
                elif isinstance(each, ast.Name):
                    place = self._names if each.id in self._local[-1] else self._names[:1]
                    self.found.add(".".join([*place, each.id]))
        self.generic_visit(node)


def is_guider(base: ast.AST) -> bool:
    return re.fullmatch(r"CFGGuider|Guider_\w+", (dotted(base) or "").rpartition(".")[2]) is not None


TABLES = {
    "transformer_options": re.compile(r"transformer_options"),
    "model_options": re.compile(r"(extra_)?model_options"),
    "patches": re.compile(r"(transformer_)?patches"),
    "replacements": re.compile(r"(transformer_)?patches_replace"),
    "out": re.compile(r"out"),
    "kwargs": re.compile(r"kwargs"),
    "conds": re.compile(r"conds"),
}
"""What a table is called where it is read or written: a variable, an attribute or another table's key."""
LOOKUPS = ("get", "pop", "setdefault")


def keys_in(node: ast.AST, table: str, context: type | None = None) -> set[str]:
    """Strings with which the code reads or writes a table. `context`: ast.Load for those that are read alone.

    `for name in ("one", "other")` and then `out[name]` counts for both.
    """
    loops = {
        loop.target.id: constants(loop.iter)
        for loop in ast.walk(node)
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and isinstance(loop.iter, (ast.Tuple, ast.List))
    }
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and is_table(each.value, table):
            if context is None or isinstance(each.ctx, context):
                found |= strings(each.slice, loops)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and is_table(each.func.value, table):
            if each.func.attr in LOOKUPS and each.args:
                found |= strings(each.args[0], loops)
        elif isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.In) and is_table(each.comparators[0], table):
            found |= strings(each.left, loops)
    return found


def patches_in(node: ast.AST) -> set[str]:
    """Names of patches that code looks for."""
    handed_on = {text for text in constants(node) if PATCH.fullmatch(text)}
    return keys_in(node, "patches") | handed_on


def is_table(node: ast.AST, table: str) -> bool:
    name = ""
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS and node.args:
        name = str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else ""
    return TABLES[table].fullmatch(name) is not None


def strings(node: ast.AST, loops: dict[str, list[str]]) -> set[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return set(loops.get(node.id, ())) if isinstance(node, ast.Name) else set()


def constants(node: ast.AST) -> list[str]:
    """The strings in the code, in order, without docstrings."""
    stated = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Expr)}
    found = (each for each in ast.walk(node) if isinstance(each, ast.Constant) and id(each) not in stated)
    return [each.value for each in found if isinstance(each.value, str)]


def is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name


def is_attribute_of(node: ast.AST, module: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module


def dotted(node: ast.AST) -> str | None:
    """comfy.ldm.flux.model.Flux of an attribute's attribute. None for other code."""
    if isinstance(node, ast.Name):
        return node.id
    above = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return None if above is None else f"{above}.{node.attr}"
