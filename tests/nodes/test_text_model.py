"""A prompt's text passes the native model's layers for it once for all that they are given."""

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from testing.cases import anima

(CASE,) = anima.CASES
TEXT, IDS, FACTORS = torch.randn(1, 5, anima.SOURCE), torch.arange(4)[None], torch.ones(1, 4, 1)


@pytest.fixture
def native_text(module, tmp_path):
    return module("model.text_model").NativeText(open_checkpoint(CASE.save(CASE.model(), tmp_path / "anima.safetensors")))


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("patched", (TEXT, IDS), {"t5xxl_weights": FACTORS}),
        (None, (TEXT + 1, IDS), {"t5xxl_weights": FACTORS}),
        (None, (TEXT, IDS + 1), {"t5xxl_weights": FACTORS}),
        (None, (TEXT, IDS), {"t5xxl_weights": 2 * FACTORS}),
        (None, (TEXT, IDS), {}),
        (None, (TEXT.double(), IDS), {"t5xxl_weights": FACTORS}),
    ],
    ids=["patches", "text", "tokens", "weights", "no weights", "dtype"],
)
def test_what_was_given_again_is_kept_and_anything_else_is_computed(native_text, name, given, named):
    first = native_text.preprocess({}, None, TEXT, IDS, t5xxl_weights=FACTORS)
    assert native_text.preprocess({}, None, TEXT.clone(), IDS.clone(), t5xxl_weights=FACTORS.clone()) is first
    assert native_text.preprocess({}, name, *given, **named) is not first
    assert native_text.preprocess({}, None, TEXT, IDS, t5xxl_weights=FACTORS) is first
