from collections.abc import Iterator
from typing import Any

import pytest

from tests.comfyui.conftest import base, bundled_workflows_models, comfyui, session_server  # noqa: F401 (fixtures)
from tests.support import chromium
from tests.support.requirements import missing


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of one file at a time: while it is open an event loop runs in this thread, which other tests start for themselves."""
    from playwright import sync_api

    if (path := chromium.find()) is None:
        missing(f"no Chromium: none of {', '.join(chromium.NAMES)} is on the path", expected=False)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
