"""Help pages and translations: one of each for every node, true to its inputs and to the messages that it shows."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh")
DEFINITIONS = """
import importlib.machinery, json, sys, types

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})
    def __call__(cls, *arguments, **named):
        return []

class Absent(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        return getattr(Anything("Anything", (), {}), name)

class ComfyUI:  # only the modules that are ComfyUI's: anything else that is missing stays missing
    def find_spec(self, name, path=None, target=None):
        ours = name.split(".")[0] in ("comfy", "comfy_execution", "folder_paths", "latent_preview", "node_helpers", "server")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None
    def create_module(self, spec):
        return Absent(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, ComfyUI())
import nodes

found = {}
for name, node in nodes.NODE_CLASS_MAPPINGS.items():
    inputs = {}
    for group in ("required", "optional"):
        for key, (kind, *settings) in node.INPUT_TYPES().get(group, {}).items():
            inputs[key] = settings[0].get("tooltip", "") if settings else ""
    found[name] = {
        "display_name": nodes.NODE_DISPLAY_NAME_MAPPINGS[name],
        "description": node.DESCRIPTION,
        "inputs": inputs,
        "outputs": len(node.RETURN_TYPES),
    }
print(json.dumps(found))
"""
"""Prints what the nodes declare. ComfyUI's modules are stand-ins without values, as nothing here runs a node."""


def node_ids() -> list[str]:
    """The keys of NODE_CLASS_MAPPINGS, read off the source: pytest collects without importing any node."""
    tree = ast.parse((ROOT / "nodes" / "__init__.py").read_text(encoding="utf-8"))
    (mapping,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NODE_CLASS_MAPPINGS"
    )
    return [key.value for key in mapping.keys]


NODES = node_ids()


@pytest.fixture(scope="module")
def defined() -> dict[str, dict[str, Any]]:
    """Node id -> what it declares."""
    done = subprocess.run([sys.executable, "-c", DEFINITIONS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == NODES
    return found


def page(node: str, language: str) -> Path:
    """Where ComfyUI's frontend asks for it: first the language's own, then the one that all languages have."""
    return ROOT / "web" / "docs" / (f"{node}.md" if language == "en" else f"{node}/{language}.md")


def locale(language: str) -> dict[str, dict[str, Any]]:
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def texts(entry: Any) -> Iterator[str]:
    if isinstance(entry, dict):
        for value in entry.values():
            yield from texts(value)
    else:
        yield entry


def chinese(text: str) -> bool:
    return re.search(r"[\u4e00-\u9fff]", text) is not None


@functools.cache
def messages() -> str:
    """Every text in the sources, one per line, with an ellipsis for what is only known when it is shown."""
    lines = []
    for path in (*(ROOT / "nodes").rglob("*.py"), *(ROOT / "parallel_backend").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                lines.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value.replace("%s", "…"))
    return "\n".join(lines)


def entries(part: str) -> list[str]:
    """The items of a part's list, each as one line. Pages have lists, no tables: the help panel is narrow."""
    return [re.sub(r"\s+", " ", item) for item in re.findall(r"^- (.*(?:\n  .*)*)", part, re.MULTILINE)]


def parts(text: str) -> list[str]:
    """Title and what the node does, inputs, example, messages, limits."""
    return text.split("\n## ")


def quoted(text: str) -> list[str]:
    """The messages that a page explains: what its fourth part has in code before the colon."""
    heads = [re.match("(?:`[^`]*`|[^`:：])*", item)[0] for item in entries(parts(text)[3])]
    return [span for head in heads for span in re.findall("`([^`]+)`", head)]


def test_no_page_and_no_entry_is_left_over():
    pages = {path.relative_to(ROOT / "web" / "docs").as_posix() for path in (ROOT / "web" / "docs").rglob("*.*")}
    assert pages == {name for node in NODES for name in (f"{node}.md", f"{node}/zh.md")}
    assert {path.relative_to(ROOT / "locales").as_posix() for path in (ROOT / "locales").rglob("*.*")} == {
        *(f"{language}/nodeDefs.json" for language in LANGUAGES),
        "zh/commands.json",
        "zh/main.json",
    }
    assert all(list(locale(language)) == NODES for language in LANGUAGES)


COMMANDS = {
    "run_on_several_gpus": ("ID", "TITLE"),
    "take_out": ("TAKE_OUT",) * 2,
    "explain_workflow": ("EXPLAIN",) * 2,
    "move_in": ("MOVE_IN",) * 2,
}
"""Script of a command of the menu -> names of its constants: the command's id, and its title, which may have an ending."""


def test_the_menus_commands_have_one_name_in_each_language():
    """The menu translates by the label, the list of shortcuts by the command's id."""
    menu, commands = (json.loads((ROOT / "locales" / "zh" / f"{name}.json").read_text()) for name in ("main", "commands"))
    labels = {}
    for script, (of_id, of_title) in COMMANDS.items():
        text = (ROOT / "web" / "js" / f"{script}.js").read_text(encoding="utf-8")
        (identity,) = re.findall(rf'^(?:export )?const {of_id} = "(.+)";$', text, re.M)
        (english,) = re.findall(rf'^(?:export )?const {of_title}(?:_TITLE)? = "([^.]+)";$', text, re.M)
        (labels[english],) = commands.pop(identity.replace(".", "_")).values()
    assert menu == {"menuLabels": labels}
    assert not commands
    assert all(map(chinese, labels.values()))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", NODES)
def test_every_input_and_output_has_words(defined, node, language):
    entry = locale(language)[node]
    assert entry.keys() == {"display_name", "description", "inputs", "outputs"}
    assert list(entry["inputs"]) == list(defined[node]["inputs"])
    assert list(entry["outputs"]) == [str(index) for index in range(defined[node]["outputs"])]
    for words in (*entry["inputs"].values(), *entry["outputs"].values()):
        assert words.keys() == {"name", "tooltip"}
    assert all(text.strip() == text and text for text in texts(entry))
    # vue-i18n reads these as its own syntax: a text with one of them is not shown.
    assert not [text for text in texts(entry) if re.search("[{}@|]", text)]


@pytest.mark.parametrize("node", NODES)
def test_english_entry_is_what_the_node_says(defined, node):
    """Messages name an input as the node does, so in English its label is its name. Copy changed tooltips to the locale."""
    said, entry = defined[node], locale("en")[node]
    assert {key: entry[key] for key in ("display_name", "description")} == {
        key: said[key] for key in ("display_name", "description")
    }
    assert entry["inputs"] == {name: {"name": name, "tooltip": tooltip} for name, tooltip in said["inputs"].items()}


@pytest.mark.parametrize("node", NODES)
def test_chinese_entry_is_chinese_and_names_the_input_that_messages_name(node):
    entry = locale("zh")[node]
    assert chinese(entry["description"])
    assert all(chinese(words["tooltip"]) for words in (*entry["inputs"].values(), *entry["outputs"].values()))
    for name, words in entry["inputs"].items():
        assert name in (words["name"], words["name"].lower()) or words["tooltip"].endswith(f"（{name}）")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", NODES)
def test_help_page(defined, node, language):
    """The same five parts on each page; every input by its name, and by its label where that is another."""
    text, entry = page(node, language).read_text(encoding="utf-8"), locale(language)[node]
    title, inputs, example, wrong, limits = parts(text)
    assert title.startswith(f"# {entry['display_name']}\n")
    heads = ("Inputs", "Example", "When it goes wrong", "Limits") if language == "en" else ("输入", "示例", "出错时", "限制")
    assert [part.splitlines()[0] for part in (inputs, example, wrong, limits)] == list(heads)
    labels = [words["name"] for words in entry["inputs"].values()]
    heads = [
        f"`{name}`: " if language == "en" else f"{label} `{name}`："
        for name, label in zip(defined[node]["inputs"], labels, strict=True)
    ]
    listed = entries(inputs)
    assert [item[: len(head)] for item, head in zip(listed, heads, strict=True)] == heads
    assert entries(wrong)
    assert "|" not in text
    assert chinese(text) == (language == "zh")
    assert re.search("(?<!`)(https?:|<)", text) is None  # nothing that is fetched or run from a help page


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", NODES)
def test_messages_that_a_page_quotes_are_in_the_sources(node, language):
    found = quoted(page(node, language).read_text(encoding="utf-8"))
    assert [message for message in found if message not in messages()] == []
    if language != "en":
        assert found == quoted(page(node, "en").read_text(encoding="utf-8"))


@pytest.mark.parametrize("node", NODES)
def test_inputs_that_a_page_names_exist(defined, node):
    """A `name_with_underscores` in prose is some node's input, or a value, file or device that is named so."""
    known = {name for said in defined.values() for name in said["inputs"]}
    others = {"fp8_e4m3fn", "dpm_adaptive", "comfy_kitchen"}
    for language in LANGUAGES:
        spans = re.findall("`([a-z0-9]+(?:_[a-z0-9]+)+)`", page(node, language).read_text(encoding="utf-8"))
        assert set(spans) <= known | others
