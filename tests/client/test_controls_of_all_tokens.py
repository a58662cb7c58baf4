"""A control that adds to all tokens behind some blocks gives the model's own forward with the same additions, in every mode,
and leaves nothing in what ranks keep of a text."""

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from testing import mini
from testing.cases import all_cases, qwen_image21

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5
CASE = next(case for case in all_cases() if case.name == "qwen-image-2.1-edit")
DISPLACED = Degrees(patch=2, patch_mode="displaced")
MODES = (Degrees(), Degrees(ulysses=3), Degrees(ring=2), Degrees(pipe=3), Degrees(tensor=2), Degrees(batch=2), DISPLACED)
CONTROLLED = (0, 2)
"""Blocks that have an addition, of three. The second of three stages has none."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the class with random weights, its file)."""
    model = CASE.model()
    return model, CASE.save(model, tmp_path_factory.mktemp("controlled") / "model.safetensors")


class Added:
    """Additions as the client sends them, and as the reference takes them."""

    def __init__(self, x, tensors, seed: int = 5):
        grid = CASE.row.patching.grid(tuple(x.shape))
        self.picture, self.text = torch.Size(grid).numel(), CASE.row.text_tokens(grid, 0, tensors)
        generator = torch.Generator().manual_seed(seed)
        size = (len(x), self.picture + self.text, CASE.row.sizes.hidden(CASE.config))
        self.of_blocks = {index: torch.randn(size, generator=generator) * 0.5 for index in CONTROLLED}

    def sent(self) -> dict[str, torch.Tensor]:
        return {f"transformer_blocks.{index}": each for index, each in self.of_blocks.items()}

    def in_joint_sequence(self) -> dict[int, torch.Tensor]:
        joint = {}
        for index, each in self.of_blocks.items():
            picture, text = each.split((self.picture, self.text), dim=1)
            joint[index] = torch.cat((text, picture), dim=1)
        return joint


def expected(model, given, added: Added):
    with torch.inference_mode():
        return qwen_image21.reference(model, *given, added.in_joint_sequence())


def nothing() -> None:
    """A poll that has nothing to look at."""


@pytest.mark.parametrize(
    ("degrees", "size"),
    [*(pytest.param(each, "whole", id=str(each)) for each in MODES), (Degrees(pipe=3), "odd"), (Degrees(ulysses=2), "odd")],
    ids=str,
)
def test_equals_the_model_s_forward_with_the_additions(made, degrees, size, pools, measured):
    model, file = made
    given = CASE.inputs(batch=1, latent=CASE.latent if size == "whole" else CASE.odd)
    added, remote = Added(given[0], given[2]), pools.load(file, degrees)
    found = remote.predict(ModelCall(*given, residuals=added.sent()), nothing)
    error = mini.relative(found, expected(model, given, added))
    measured(f"relative error with a control of all tokens, {CASE.name}", error)
    assert error <= TOLERANCE
    plain = remote.predict(ModelCall(*given), nothing)
    assert mini.relative(found, plain) > 0.05  # the additions show


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=3), Degrees(ulysses=2)], ids=str)
def test_a_kept_text_is_not_the_controlled_one(made, degrees, pools):
    """A control has a start and an end: calls with it and without it alternate in one conditioning."""
    model, file = made
    given = CASE.inputs(batch=1)
    first, second = (Added(given[0], given[2], seed) for seed in (5, 6))
    remote = pools.load(file, degrees)
    plain = remote.predict(ModelCall(*given), nothing)
    for added in (first, None, second, first, None):
        found = remote.predict(ModelCall(*given, residuals={} if added is None else added.sent()), nothing)
        wanted = plain if added is None else expected(model, given, added)
        assert mini.relative(found, wanted) <= TOLERANCE
