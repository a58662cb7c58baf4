"""The panel of ranks and the lines on nodes, in both languages: modules of web/js on a page with stand-ins for ComfyUI's."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import PAGE

pytestmark = [pytest.mark.browser]

SEND = "([name, detail]) => window.api.dispatchEvent(new CustomEvent(name, { detail }))"
RUNS = [f"Parallel DiT: {number}.5 s, 0.{number} s a step\nexact, on {number} ranks" for number in range(2, 9)]


def rank(device: str, state: str, weights: int, run: int, free: int, total: int) -> dict[str, Any]:
    found = {"device": device, "state": state, "doing": "", "weights": weights, "run": run}
    return found | {"free": free * 10**9, "total": total * 10**9}


def model(name: str, axis: str, weights: list[int], streamed: list[int]) -> dict[str, Any]:
    found = {"name": f"{name}.safetensors", "degrees": f"{axis}_degree 3", "weights": weights, "streamed": streamed}
    return found | {"parked": not any(weights)}


RANKS = [
    rank("cuda:0", "idle", 10**9, 3 * 10**8, 18, 24),
    rank("cuda:0", "working", 25 * 10**8, 5 * 10**8, 18, 24),
    rank("cuda:1", "failed", 4 * 10**9, 0, 11, 16),
]
NAMES = "parked", "<i>older</i>", "newest"
"""A file's name is text."""
MODELS = [
    model(NAMES[0], "ring", [0, 0, 0], [0, 0, 0]),
    model(NAMES[1], "ulysses", [10**9] * 3, [0, 2 * 10**9, 10**8]),
    model(NAMES[2], "pipefusion", [5 * 10**8, 10**9, 10**9], [0, 0, 0]),
]
STATE = {"pools": [{"ranks": RANKS, "models": MODELS, "notes": [], "error": "", "logs": "/logs/7"}]}


@pytest.fixture(scope="module")
def opened(pack_page) -> Callable[..., Any]:
    """`opened(module, locale)`: a page on which this module of web/js has been set up. `answer`: of the server."""

    def open_module(module: str, locale: str, answer: Any = None) -> Any:
        pack_page.goto(PAGE)
        pack_page.evaluate(
            """async ([module, locale, answer]) => {
                window.locale = locale;
                window.answer = { ok: true, text: async () => JSON.stringify(answer) };
                window.api = (await import("/scripts/api.js")).api;
                await import(`./${module}.js`);
                window.extension?.setup();
                window.tab?.render(document.body);
            }""",
            [module, locale, answer],
        )
        return pack_page

    return open_module


def panel(opened: Callable[..., Any], locale: str) -> Any:
    """The panel with STATE, after RUNS."""
    page = opened("ranks_panel", locale, STATE)
    page.locator(".row > .bar").first.wait_for()
    for number, text in enumerate(RUNS):
        page.evaluate(SEND, ["execution_start", {}])
        page.evaluate(SEND, ["parallel_dit.said", {"node": "3", "text": "Parallel DiT: starting 3 ranks"}])
        page.evaluate(SEND, ["parallel_dit.said", {"node": "3", "text": text}])
        page.evaluate(SEND, [("execution_success", "execution_error", "execution_interrupted")[number % 3], {}])
    return page


def texts(page: Any) -> list[str]:
    """What the panel shows, and its tooltips and labels."""
    shown = page.locator(".pdit").inner_text()
    named = page.evaluate("() => [...document.querySelectorAll('.pdit *')].flatMap(e => [e.title, e.ariaLabel])")
    return [shown.replace(PAGE, ""), *(name for name in named if name)]


def test_panel_of_ranks_that_share_a_card(opened):
    page = panel(opened, "en")
    bars = [bar.get_attribute("aria-label") for bar in page.locator(".row > .bar").all()]
    shared = "weights 3.5 GB, keys, values, prompts 800 MB, other 1.7 GB"
    assert bars == [shared, shared, "weights 4.0 GB, keys, values, prompts 0 MB, other 1.0 GB"]
    widths = page.evaluate(
        "() => [...document.querySelectorAll('.row > .bar')].map(b => [...b.children].map(p => p.style.width))"
    )
    assert [round(float(width.rstrip("%")), 1) for width in widths[0]] == [14.6, 3.3, 7.1]
    lines = [line.inner_text() for line in page.locator(".row .line.quiet").all()]
    assert [re.search(r"weights (.*?B)", line)[1] for line in lines] == ["1.0 GB", "2.5 GB", "4.0 GB"]
    dots = page.evaluate("() => [...document.querySelectorAll('.dot')].map(dot => dot.className)")
    assert dots == ["dot idle", "dot working", "dot failed"]


def test_panel_shows_the_last_runs_and_models_newest_first(opened):
    page = panel(opened, "en")
    runs = [row.inner_text() for row in page.locator("h3:text-is('Last runs') ~ .row.quiet").all()]
    assert runs == RUNS[:1:-1]
    models = page.locator("h3:text-is('Models') ~ .row:not(.quiet)").all()
    assert [model.locator(".device").inner_text() for model in models] == [f"{name}.safetensors" for name in reversed(NAMES)]
    held = [model.locator(":scope > .quiet").nth(1).inner_text() for model in models]
    assert held == ["2.5 GB on the devices", "3.0 GB on the devices, 2.1 GB in host memory", "parked in host memory"]


def test_chinese_panel_has_the_english_ones_numbers(opened):
    """In texts, tooltips and labels, of each run too. No English is left but names."""
    english, chinese = (texts(panel(opened, locale)) for locale in ("en", "zh"))
    numbers = [[sorted(re.findall(r"\d[\d.]*\d|\d", text)) for text in shown] for shown in (english, chinese)]
    assert numbers[0] == numbers[1]
    assert len(english) == len(chinese)
    untranslated = [text for text in chinese if not re.search(r"[\u4e00-\u9fff]", text)]
    assert untranslated == []
    assert not re.search(r"[a-z]{2,} [a-z]{2,}", chinese[0])


@pytest.mark.parametrize("end", ["execution_success", "execution_error"])
def test_line_on_a_node_is_chinese_after_the_runs_end_too(opened, end):
    page = opened("node_text", "zh-TW")
    page.evaluate(
        "() => { window.shown = []; window.api.addEventListener('progress_text', ({ detail }) => shown.push(detail)) }"
    )
    page.evaluate(SEND, ["execution_start", {}])
    for node, text in (("3", RUNS[0]), ("9", "Parallel DiT: starting 2 ranks"), ("9", RUNS[1])):
        page.evaluate(SEND, ["parallel_dit.said", {"node": node, "text": text}])
    during = page.evaluate("() => shown.splice(0)")
    page.evaluate(SEND, [end, {}])
    page.wait_for_function("() => shown.length == 2")
    after = page.evaluate("() => shown")
    assert after == [during[0], during[2]]
    assert [each["nodeId"] for each in after] == ["3", "9"]
    assert [each["text"] for each in after] == [
        f"Parallel DiT: {number}.5 秒，每步 0.{number} 秒\n精确，{number} 个计算进程" for number in (2, 3)
    ]
