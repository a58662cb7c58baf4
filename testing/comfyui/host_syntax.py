"""What host_names.py looks for in Python code: keys of tables, and names of patches."""

import ast
import re

PATCH = re.compile(r"[a-z0-9_]+_patch")
"""A native model hands the name of a patch on as an argument: Cosmos' blocks."""

TABLES = {
    "transformer_options": re.compile(r"transformer_options"),
    "model_options": re.compile(r"(extra_)?model_options"),
    "patches": re.compile(r"(transformer_)?patches"),
    "replacements": re.compile(r"(transformer_)?patches_replace"),
    "conds": re.compile(r"conds"),
}
"""What a table is called where it is read or written: a variable, an attribute or another table's key."""
LOOKUPS = ("get", "pop", "setdefault")


def keys_in(node: ast.AST, table: str) -> set[str]:
    """Strings with which the code reads or writes a table.

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
