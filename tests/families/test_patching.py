"""Latents become tokens and back; what is no whole number of patches is padded circularly, as ComfyUI does."""

import pytest
import torch

from parallel_backend.families.base.patching import Patching


@pytest.mark.parametrize("sides", [(6, 4), (5, 4), (6, 3), (5, 3), (1, 1)])
def test_odd_sides_are_padded_with_the_first_rows_and_columns(sides):
    latent, patching = torch.randn(2, 3, *sides), Patching(side=2)
    rows, columns = (side + side % 2 for side in sides)
    whole = latent[:, :, [row % sides[0] for row in range(rows)]][..., [column % sides[1] for column in range(columns)]]
    tokens = patching.pack(latent)
    assert patching.grid(latent.shape) == (rows // 2, columns // 2)
    assert torch.equal(tokens, patching.pack(whole))
    assert torch.equal(patching.unpack(tokens, tuple(latent.shape)), latent)


@pytest.mark.parametrize(
    ("grid", "axis"), [((21, 30, 52), "rows"), ((40, 30, 52), "frames"), ((8, 8, 6), "rows"), ((1, 4, 6), "rows")]
)
def test_bands_are_cut_along_the_longer_of_time_and_height(grid, axis):
    assert Patching(video=True).best_axis(grid) == axis
    assert Patching().best_axis(grid[1:]) == "rows"


def test_a_token_is_a_patch():
    latent = torch.arange(2.0 * 4 * 6).view(1, 2, 4, 6)
    tokens = Patching(side=2).pack(latent)
    assert tokens.shape == (1, 6, 8)
    assert torch.equal(tokens[0, 4], latent[0, :, 2:4, 2:4].flatten())
