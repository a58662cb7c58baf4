"""How many tokens a call's references have is known before the call: bands are cut by it."""

from typing import Any

import torch

from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import REFERENCES
from parallel_backend.families.parts.references import reference_tokens
from testing.cases.minimax_h3 import CONFIG, GRID, payload


def test_references_and_keyframes_of_minimax_without_those_of_sound():
    row, text = FAMILIES["minimax-h3"], torch.zeros(1, 7, CONFIG["text_dim"])
    given: dict[str, Any] = {"context": text, "minimax_payload": payload(torch.Generator().manual_seed(0), GRID)}
    found = row.inputs.conditioning(CONFIG, given | {"grid": GRID})
    sound = int(found["reference_sound"].sum())
    assert reference_tokens(row, given) == found[REFERENCES].shape[1] - sound > 0 < sound
    assert reference_tokens(row, {"context": text}) == 0
