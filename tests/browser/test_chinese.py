"""The pack's texts in an editor in Chinese: tables of web/js, run by a browser without ComfyUI."""

import re
from collections.abc import Callable

import pytest

from tests.browser.conftest import PAGE
from tests.browser.said_texts import LINES, TOASTS, reasons

pytestmark = [pytest.mark.browser]

ENGLISH = re.compile(r"[a-z]{2,} (?:[a-z]+ )?[a-z]{2,}")
"""Words in a row, where a name is one word."""


@pytest.fixture(scope="module")
def chinese(pack_page) -> Callable[[str, list[str]], list[str]]:
    """`chinese(module, texts)`: what the module of web/js makes of each text, by the function that it is named for."""
    pack_page.goto(PAGE)
    functions = {"chinese_lines": "chinese", "chinese_toasts": "chineseToast"}
    return lambda module, texts: pack_page.evaluate(
        f"async texts => texts.map((await import('{PAGE}{module}.js')).{functions[module]})", texts
    )


def is_translated(text: str, chinese: str) -> bool:
    """It has Chinese, no English but for names, and the numbers of the text."""
    numbers, found = (sorted(re.findall(r"\d[\d.]*\d|\d", each)) for each in (text, chinese))
    return re.search(r"[\u4e00-\u9fff]", chinese) is not None and not ENGLISH.search(chinese) and numbers == found


def test_every_line_on_a_node_has_chinese_words(chinese):
    shown = chinese("chinese_lines", [f"Parallel DiT: {line}" for line in LINES])
    assert [line for line, each in zip(LINES, shown, strict=True) if not is_translated(line, each)] == []
    assert all(each.startswith("Parallel DiT: ") for each in shown)


def test_every_reason_has_chinese_words(chinese):
    """As PipeFusion tells it, and as a VAE's node does."""
    said = [f"not in patches: {reason}" for reason in reasons()]
    said += [f"Encoded whole by ComfyUI, because {reason}." for reason in reasons()]
    shown = chinese("chinese_lines", said)
    assert [line for line, each in zip(said, shown, strict=True) if not is_translated(line, each)] == []


def test_every_toast_has_chinese_words(chinese):
    shown = chinese("chinese_toasts", list(TOASTS))
    assert [text for text, each in zip(TOASTS, shown, strict=True) if not is_translated(text, each)] == []


def test_other_texts_stay_as_they_are(chinese):
    whole = "Parallel DiT: 1.8 s, 0.09 s a step\nexact, on 2 ranks\nwhat nobody has translated"
    (shown,) = chinese("chinese_lines", [whole])
    assert shown == "Parallel DiT: 1.8 秒，每步 0.09 秒\n精确，2 个计算进程\nwhat nobody has translated"
    refused = "Not changed: Load Diffusion Model: flux.gguf is not a file of a kind that is known."
    (shown,) = chinese("chinese_toasts", [refused])
    assert shown == "保持原样：Load Diffusion Model：flux.gguf is not a file of a kind that is known。"
