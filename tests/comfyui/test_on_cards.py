"""A real ComfyUI whose ranks are on cards, CUDA devices in software: every picture is that of CPU ranks, bit for bit."""

from pathlib import Path

import pytest

from testing.comfyui.scripted import Inside
from tests.comfyui.conftest import SCRIPTS

pytestmark = [pytest.mark.comfyui, pytest.mark.full]

CASES = ("LoRA", "ControlNet pipefusion", "VAE")
"""Over tokens, in bands, and bands of a VAE. Other modes on cards are in tests/emulated."""


@pytest.fixture(scope="module")
def found(comfyui, base, tmp_path_factory) -> dict:
    """What came of the cases with ComfyUI on the first card, and what was noted of the cards."""
    folder: Path = tmp_path_factory.mktemp("cards")
    (folder / "cards").write_text("ADA ADA")
    # Modules that give a process the cards. They are not imported here, where there are none.
    environment = {"PARALLEL_DIT_FIRST": "tests.support.emulated_gpu.comfyui", "PARALLEL_DIT_EMULATED_GPUS": str(folder)}
    inside = Inside(comfyui, base, SCRIPTS, ["--disable-dynamic-vram"], environment)
    try:
        results = inside.run("on_cards")[0]
    finally:
        inside.close()
    assert results.pop("device") == "cuda:0"
    return results | {"violations": (folder / "violations").read_text()}


def test_doctor_predicts_another_gpu_beside_a_card(found):
    """A card that torch names NVIDIA GeForce RTX 4090 is in the table."""
    _, predicted = found["doctor"].split("with RTX 3090 24 GB, PCIe x8, predicted: ")
    assert "RTX 4090, 2" in found["doctor"]
    assert all(f"{mode}_degree 2" in predicted for mode in ("pipefusion", "tensor_parallel", "ulysses", "patch"))
    assert "one device (cuda:0)" in predicted or "one device (RTX 3090 24 GB)" in predicted


@pytest.mark.parametrize("case", CASES)
def test_ranks_on_cards_give_what_cpu_ranks_give(found, case):
    """Nothing is noted of the cards, and Unload leaves nothing on them."""
    result, violations = found[case], found["violations"]
    assert result == {"difference": 0.0, "devices": ["cpu", "cpu", "cuda:0", "cuda:1"], "left": [0, 0]}
    assert not violations, violations[:4000]
