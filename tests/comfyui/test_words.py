"""A running ComfyUI serves the pack's help pages and translations at the addresses that its frontend asks for."""

import json
import urllib.request

import pytest

from scripts.comfyui_server import PACK, ComfyUIServer
from tests.comfyui.conftest import FOLDER

pytestmark = pytest.mark.comfyui

QUICKSTART = ["QuickstartPrompt", "QuickstartDecode"]
"""Nodes of the bundled model alone."""
MODULE = f"custom_nodes.{FOLDER}"


@pytest.fixture(scope="module")
def ours(session_server):
    """Node id -> its definition, for the pack's nodes."""
    return {name: node for name, node in session_server.object_info().items() if node["python_module"] == MODULE}


def ask_for_page(server: ComfyUIServer, name: str):
    """As the frontend's fetchCustomNodeHelp does, which takes the pack's name from the node's Python module."""
    address = f"http://127.0.0.1:{server.port}/extensions/{MODULE.split('.')[1]}/docs/{name}"
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=30)


def test_every_node_has_its_help_page_in_both_languages(session_server, ours):
    assert "ParallelDiTLoader" in ours
    for node in ours:
        for name in (f"{node}.md", f"{node}/zh.md"):
            with ask_for_page(session_server, name) as answer:
                assert answer.read() == (PACK / "web" / "docs" / name).read_bytes()
                assert "text/html" not in answer.headers["Content-Type"]  # which the frontend takes for a missing page


def test_translations_are_those_of_the_locales(session_server, ours):
    served = json.loads(session_server.get("/i18n"))
    assert served.keys() == {"en", "zh"}
    for language, words in served.items():
        files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (PACK / "locales" / language).iterdir()}
        assert words == {**files.pop("main", {}), **files}
        assert words["nodeDefs"].keys() == ours.keys()


def test_nodes_are_found_by_who_looks_for_several_gpus(ours):
    assert [name for name, node in ours.items() if "multi gpu" not in node["search_aliases"]] == QUICKSTART


def test_scripts_of_ours_run_in_the_browser(session_server):
    scripts = {path.rpartition("/")[2] for path in json.loads(session_server.get("/extensions")) if FOLDER in path}
    assert scripts == {path.name for path in (PACK / "web" / "js").iterdir()}
