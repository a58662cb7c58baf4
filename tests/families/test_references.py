"""How many tokens a call's references have is known before the call: bands are cut by it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import REFERENCE_POSITIONS, REFERENCES, REFERENCES_AT_ZERO
from parallel_backend.families.parts.references import reference_tensors, reference_tokens
from testing import tiny
from testing.cases import all_cases
from testing.cases.minimax_h3 import CONFIG, GRID, payload

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(
    ("family", "pictures"),
    [
        ("flux", [torch.zeros(1, 16, 8, 6), torch.zeros(1, 16, 5, 7)]),
        ("qwen-image", [torch.zeros(1, 16, 8, 6), torch.zeros(1, 16, 1, 4, 4)]),
    ],
)
def test_reference_latents(family: str, pictures: list[torch.Tensor]):
    row, given = FAMILIES[family], {"ref_latents": pictures}
    assert reference_tokens(row, given) == reference_tensors(row.patching, given, "index")[REFERENCES].shape[1]
    assert reference_tokens(row, {}) == reference_tokens(row, {"ref_latents": []}) == 0


def test_references_and_keyframes_of_minimax_without_those_of_sound():
    row, text = FAMILIES["minimax-h3"], torch.zeros(1, 7, CONFIG["text_dim"])
    given: dict[str, Any] = {"context": text, "minimax_payload": payload(torch.Generator().manual_seed(0), GRID)}
    found = row.inputs.conditioning(CONFIG, given | {"grid": GRID})
    sound = int(found["reference_sound"].sum())
    assert reference_tokens(row, given) == found[REFERENCES].shape[1] - sound > 0 < sound
    assert reference_tokens(row, {"context": text}) == 0


@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-2511"])
def test_the_conditioning_says_whether_references_are_at_zero(name: str, pools, tmp_path: Path):
    """A node decides it, whatever the file's own way is. A file with either way runs without references too."""
    case = next(case for case in all_cases() if case.name == name)
    model = pools.load(case.save(case.model(), tmp_path / "model.safetensors"), Degrees())
    x, timestep, tensors = case.inputs()

    def output(**given: torch.Tensor) -> torch.Tensor:
        return model.predict(ModelCall(x, timestep, given), lambda: None)

    plain = {key: value for key, value in tensors.items() if key != REFERENCES_AT_ZERO}
    at_zero = output(**plain, **{REFERENCES_AT_ZERO: torch.ones(len(x), 1, dtype=torch.bool)})
    assert tiny.relative(at_zero, output(**plain)) > 1e-3
    without = {key: value for key, value in plain.items() if key not in (REFERENCES, REFERENCE_POSITIONS)}
    assert output(**without).isfinite().all()
