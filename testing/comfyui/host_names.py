"""The names that a ComfyUI defines for what nodes put on a MODEL or a conditioning, read from its source by `ast`.

`python -m testing.comfyui.host_names [CHECKOUT]` writes them to names/comfyui-<version>.json. Tests hold the
nodes' tables to them (tests/nodes/rows.py).
"""

import argparse
import ast
import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .host_syntax import PATCH, TABLES, constants, is_attribute_of, is_named, keys_in, patches_in

NAMES = Path(__file__).parent / "names"
CLASSES = {"wrappers": ("patcher_extension", "WrappersMP"), "callbacks": ("patcher_extension", "CallbacksMP")}
"""Kind -> module of comfy and class whose string attributes are the names."""
ENUMS = {
    "hook types": "EnumHookType",
    "hook modes": "EnumHookMode",
    "hook scopes": "EnumHookScope",
    "hook targets": "EnumWeightTarget",
}
"""Kind -> class of comfy/hooks.py."""
SETTERS = re.compile(r"(set|add)_\w+")
"""Methods of ModelPatcher that put something on a MODEL."""
NOT_ON_A_MODEL = ("text_encoders", "audio_encoders", "clip_vision.py", "sd.py", "sd1_clip.py", "sdxl_clip.py", "ops.py")
"""Files and folders of comfy whose `model_options` are those of a text encoder or a loader."""


def host_names(checkout: Path) -> dict[str, Any]:
    """Kind -> names, sorted; of some kinds a mapping of names to what belongs to them."""
    source = Source(checkout)
    names: dict[str, Any] = {kind: source.strings_of(*place) for kind, place in CLASSES.items()}
    names |= {kind: source.strings_of("hooks", name) for kind, name in ENUMS.items()}
    return names | {
        "refused hooks": source.refused_hooks(),
        "setters": source.setters(),
        "patcher state": source.cloned(),
        "patches": source.patches(),
        "replaced": source.keys("replacements", ("comfy", "comfy_extras")),
        "transformer_options": source.keys("transformer_options", ("comfy", "comfy_extras")),
        "model_options": source.keys("model_options", ("comfy", "comfy_extras"), NOT_ON_A_MODEL),
        "entries": source.entries(),
        "samplers": source.samplers(),
    }


class Source:
    """The Python files of a ComfyUI checkout."""

    def __init__(self, checkout: Path):
        self.checkout = checkout

    @property
    def version(self) -> str:
        return constants(self.tree(self.checkout / "comfyui_version.py"))[-1]

    @functools.cache  # noqa: B019 (an object lives as long as one reading)
    def tree(self, path: Path) -> ast.Module:
        return ast.parse(path.read_text(encoding="utf-8"))

    def module(self, name: str) -> ast.Module | None:
        """comfy.<name>, None if there is no such file."""
        path = self.checkout / "comfy" / f"{name.replace('.', '/')}.py"
        return self.tree(path) if path.is_file() else None

    @functools.cache  # noqa: B019
    def definitions(self, name: str) -> dict[str, ast.AST]:
        """Top-level classes and functions of comfy.<name>."""
        tree = self.module(name)
        kinds = (ast.ClassDef, ast.FunctionDef)
        return {} if tree is None else {node.name: node for node in tree.body if isinstance(node, kinds)}

    def strings_of(self, module: str, name: str) -> list[str]:
        """String attributes of a class, as of an enum."""
        assigned = (node for node in self.definitions(module)[name].body if isinstance(node, ast.Assign))
        return sorted(node.value.value for node in assigned if isinstance(node.value, ast.Constant))

    def refused_hooks(self) -> list[str]:
        """The hook types that ComfyUI itself does not take: their classes raise NotImplementedError."""
        enum = next(node for node in self.tree(self.checkout / "comfy/hooks.py").body if is_named(node, "EnumHookType"))
        values = {each.targets[0].id: each.value.value for each in enum.body if isinstance(each, ast.Assign)}
        found = set()
        for node in self.definitions("hooks").values():
            if isinstance(node, ast.ClassDef) and any(is_named(each, "add_hook_patches") for each in node.body):
                (method,) = (each for each in node.body if is_named(each, "add_hook_patches"))
                if isinstance(method.body[0], ast.Raise):
                    found |= {values[each.attr] for each in ast.walk(node) if is_attribute_of(each, "EnumHookType")}
        return sorted(found)

    def setters(self) -> dict[str, list[str]]:
        """ModelPatcher's methods that put something on a MODEL -> the strings in them, among which is where they put it."""
        methods = self.methods("model_patcher", "ModelPatcher")
        return {name: sorted(set(constants(body))) for name, body in sorted(methods.items()) if SETTERS.fullmatch(name)}

    def methods(self, module: str, name: str) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.definitions(module)[name].body if isinstance(node, ast.FunctionDef)}

    def cloned(self) -> list[str]:
        """Attributes that ModelPatcher.clone() gives the clone."""
        clone = self.methods("model_patcher", "ModelPatcher")["clone"]
        found = {
            node.attr
            for node in ast.walk(clone)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "n"
        }
        return sorted(found)

    def patches(self) -> list[str]:
        """Names of patches that native models look for, and those that setters give names to."""
        given = {name for strings in self.setters().values() for name in strings if PATCH.fullmatch(name)}
        paths = (path for path in self.files(("comfy/ldm",)) if "patch" in path.read_text(encoding="utf-8"))
        read = {name for path in paths for name in patches_in(self.tree(path))}
        return sorted(given | read)

    def keys(self, table: str, folders: Iterable[str], without: Iterable[str] = ()) -> list[str]:
        """Keys with which the files in these folders read or write a table (TABLES)."""
        paths = (path for path in self.files(folders, without) if TABLES[table].search(path.read_text(encoding="utf-8")))
        return sorted({key for path in paths for key in keys_in(self.tree(path), table)})

    def files(self, folders: Iterable[str], without: Iterable[str] = ()) -> Iterator[Path]:
        for folder in folders:
            for path in sorted((self.checkout / folder).rglob("*.py")):
                if not set(path.relative_to(self.checkout).parts).intersection(without):
                    yield path

    def entries(self) -> list[str]:
        """Keys of a conditioning that decide where, when and how strongly ComfyUI evaluates it."""
        function = self.definitions("samplers")["get_area_and_mult"]
        return sorted({*keys_in(function, "conds"), "default", "control"})

    def samplers(self) -> list[str]:
        """Functions of comfy that run a sampler's steps."""
        paths = self.files(("comfy/k_diffusion", "comfy/extra_samplers"))
        kinds = ((path.stem, node) for path in paths for node in self.tree(path).body if isinstance(node, ast.FunctionDef))
        return sorted(f"{module}.{node.name}" for module, node in kinds if node.name.startswith("sample_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path.home() / "ComfyUI")
    checkout = parser.parse_args().checkout
    NAMES.mkdir(exist_ok=True)
    path = NAMES / f"comfyui-{Source(checkout).version}.json"
    text = json.dumps(host_names(checkout), indent=1)
    short_lists = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(short_lists + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
