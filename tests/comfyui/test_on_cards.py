"""A real ComfyUI whose ranks are on cards, CUDA devices in software: every picture is that of CPU ranks, bit for bit."""

import functools
from collections.abc import Callable, Iterator

import pytest

from testing.comfyui.scripted import Inside
from tests.comfyui.conftest import SCRIPTS, unselected

pytestmark = pytest.mark.comfyui

CASES = ("ulysses", "pipefusion", "tensor", "LoRA", "streamed", "ControlNet ulysses", "ControlNet pipefusion", "VAE")
CPU, CARD = "ComfyUI on the CPU", "ComfyUI on the first card"
VARIABLE = "PARALLEL_DIT_EMULATED_GPUS"  # processes.VARIABLE: that module gives a process that imports it the cards
OWN = {CPU: ("cpu", [], "processes"), CARD: ("cuda:0", ["--disable-dynamic-vram"], "comfyui")}
"""ComfyUI's device, its flags, and the module of emulated_gpu that gives a process the cards."""
DEFAULT = [(CARD, case) for case in ("LoRA", "ControlNet pipefusion")]
"""By Ulysses and in bands. VAEs on cards are in tests/emulated."""


@pytest.fixture(scope="module")
def found(request, comfyui, base, tmp_path_factory) -> Callable[[str], dict]:
    """What came of the cases with ComfyUI on that device, and what was noted of the cards."""

    @functools.cache
    def run(where: str) -> dict:
        own, flags, first = OWN[where]
        others = unselected(request, "where", "case", of=((where, case) for case in CASES))
        folder = tmp_path_factory.mktemp("cards")
        (folder / "cards").write_text("ADA ADA")
        environment = {"PARALLEL_DIT_FIRST": f"tests.support.emulated_gpu.{first}", VARIABLE: str(folder)}
        inside = Inside(comfyui, base, SCRIPTS, flags, environment)
        try:
            results = inside.run("on_cards", skip=[other.removeprefix(f"{where}, ") for other in others])[0]
        finally:
            inside.close()
        assert results.pop("device") == own
        return results | {"violations": (folder / "violations").read_text()}

    return run


def of_all() -> Iterator[pytest.param]:
    for where in OWN:
        for case in CASES:
            yield pytest.param(where, case, marks=() if (where, case) in DEFAULT else pytest.mark.full)


@pytest.mark.parametrize(("where", "case"), of_all())
def test_ranks_on_cards_give_what_cpu_ranks_give(found, where, case):
    """Nothing is noted of the cards, and Unload leaves nothing on them."""
    result, violations = found(where)[case], found(where)["violations"]
    assert "error" not in result, result.get("traceback")
    assert result == {"difference": 0.0, "devices": ["cpu", "cpu", "cuda:0", "cuda:1"], "left": [0, 0]}
    assert not violations, violations[:4000]
