import mimetypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.comfyui_server import PACK, ComfyUIServer
from tests.browser.editor import READY, Editor
from tests.comfyui.conftest import base, bundled_workflows_models, comfyui, session_server  # noqa: F401 (fixtures)
from tests.support import chromium
from tests.support.requirements import missing

PAGE = "http://pack.test/extensions/pack/js/"
STAND_INS = {
    "api.js": "export const api = Object.assign(new EventTarget(), { fetchApi: async () => window.answer });",
    "app.js": """export const app = {
        registerExtension: (extension) => { window.extension = extension },
        extensionManager: { registerSidebarTab: (tab) => { window.tab = tab } },
        ui: { settings: { getSettingValue: () => window.locale } },
    };""",
}
SECONDS = 60
"""Limit of what the page does, for a machine whose cores are shared."""
SETTINGS = chromium.SETTINGS | {"Comfy.Graph.CanvasInfo": False, "Comfy.Locale": "en", "Comfy.RightSidePanel.IsOpen": False}
OWN = "own"
"""The editor that the ComfyUI checkout comes with, the oldest that is supported."""
NEWER = re.findall(r"^[\w-]+==(.+)$", (PACK / "frontends.txt").read_text(), re.MULTILINE)
EDITORS = (OWN, *(pytest.param(version, marks=pytest.mark.full) for version in NEWER))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of one file at a time: while it is open an event loop runs in this thread, which other tests start for themselves."""
    from playwright import sync_api

    if (path := chromium.find()) is None:
        missing(f"no Chromium: none of {', '.join(chromium.NAMES)} is on the path", expected=False)
    # A page that is given by a test is of no network, to Chromium, and might not call ComfyUI on this machine.
    flags = ["--no-sandbox", "--disable-features=LocalNetworkAccessChecks"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pack_page(browser) -> Iterator[Any]:
    """A page at PAGE for the modules of web/js, with stand-ins for ComfyUI's."""
    page = browser.new_page()

    def served(route):
        url = route.request.url
        name = url.rsplit("/", 1)[1]
        own = (PACK / "web" / "js" / name).read_text() if name and "/scripts/" not in url else ""
        route.fulfill(body=STAND_INS.get(name, own), content_type="text/javascript" if name else "text/html")

    page.route("http://pack.test/**", served)
    yield page
    page.close()


@pytest.fixture(scope="module")
def server(session_server, bundled_workflows_models) -> ComfyUIServer:  # noqa: F811
    return session_server


@pytest.fixture(scope="module", params=EDITORS)
def editor(browser, server, request) -> Iterator[Editor]:
    """ComfyUI's page, in each editor. The server is as before the first one: of its settings and of what it has computed."""
    server.post("/settings", SETTINGS)
    server.post("/free", {"unload_models": True, "free_memory": True})
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.set_default_timeout(1000 * SECONDS)
    address = f"http://127.0.0.1:{server.port}/"
    if request.param != OWN:
        give_frontend(page, address, request.param)
    page.goto(address)
    page.wait_for_function(READY)
    yield Editor(page)
    page.close()


def give_frontend(page: Any, address: str, version: str) -> None:
    """The page gets the editor's files from this version's package, as of a server with --front-end-root, and all else from
    the server. So one ComfyUI does for every editor. Skips where the package is not installed."""
    static = Path(sys.prefix) / "frontends" / version / "comfyui_frontend_package" / "static"
    if not static.is_dir():
        missing(f"no editor {version} in {static.parents[1]}; scripts/test installs it")
    files = "|".join(re.escape(path.name) for path in static.iterdir())

    def give(route):
        file = static / (route.request.url.removeprefix(address).split("?")[0] or "index.html")
        if file.is_file():
            kind = mimetypes.guess_type(file.name)[0]
            route.fulfill(body=file.read_bytes(), content_type=kind)
        else:
            route.continue_()

    page.route(re.compile(rf"{re.escape(address)}(({files})(/[^?]*)?)?(\?.*)?$"), give)


@pytest.fixture(scope="module")
def shoot(editor) -> Iterator[Callable[[str], None]]:
    """`shoot(name)`: a screenshot, if any are wanted. Those of one name with -1, -2, ... become an animated image too."""
    if (folder := os.environ.get("PARALLEL_DIT_SCREENSHOTS")) is None:
        yield lambda _name: None
        return
    yield lambda name: editor.page.screenshot(path=Path(folder) / f"{name}.png")
    for first in Path(folder).glob("*-1.png"):
        name = first.stem.removesuffix("-1")
        frames = [Image.open(path).resize((1200, 675)) for path in sorted(Path(folder).glob(f"{name}-[0-9].png"))]
        frames[0].save(Path(folder) / f"{name}.webp", save_all=True, append_images=frames[1:], duration=2500, loop=0)
