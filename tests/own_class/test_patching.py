"""Latents become tokens and back; what is no whole number of patches is padded circularly, as ComfyUI does."""

import pytest
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut, packed
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.patching import Companion, Patching


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
    ("grid", "axis"), [((21, 30, 52), "frames"), ((15, 45, 80), "frames"), ((14, 45, 80), "rows"), ((1, 4, 6), "rows")]
)
def test_bands_are_cut_along_time_unless_it_has_far_fewer_tokens_than_the_height(grid, axis):
    assert Patching(video=True).best_axis(grid) == axis
    assert Patching().best_axis(grid[1:]) == "rows"


def test_a_token_is_a_patch():
    latent = torch.arange(2.0 * 4 * 6).view(1, 2, 4, 6)
    tokens = Patching(side=2).pack(latent)
    assert tokens.shape == (1, 6, 8)
    assert torch.equal(tokens[0, 4], latent[0, :, 2:4, 2:4].flatten())


@pytest.mark.parametrize(
    ("pattern", "sound", "tokens"),
    [("b c s t -> b (s t) c", (32, 2, 5), 10), ("b c t f -> b t (c f)", (8, 5, 4), 5), ("b c t -> b t c", (3, 7), 7)],
)
def test_a_companion_latent_goes_through_tokens_and_bands_and_comes_back(pattern, sound, tokens):
    """Its channels are more than the video's token has, as many, and fewer."""
    patching = Patching(video=True, companion=Companion(pattern, sound))
    latents = torch.randn(2, 8, 3, 5, 6), torch.randn(2, *sound)
    shapes = tuple(tuple(latent.shape) for latent in latents)
    assert patching.companion_tokens(shapes) == patching.companion_tokens(patching.usual(shapes[0])) == tokens
    whole = patching.pack_all(latents)
    assert whole.shape == (2, 3 * 3 * 3 + tokens, 32)
    assert all(torch.equal(*pair) for pair in zip(patching.unpack_all(whole, shapes), latents, strict=True))

    cut = BandCut(patching, (Span(0, 4), Span(4, 5)), shapes)
    flat = packed(latents)
    assert flat.shape == (2, 1, 8 * 3 * 5 * 6 + sound[0] * latents[1][0, 0].numel())
    bands = [cut.band(flat, index) for index in range(2)]
    assert [band.shape[-1] for band in bands] == [8 * 3 * 4 * 6 + latents[1][0].numel(), 8 * 3 * 6]
    assert torch.equal(bands[1].view(2, 8, 3, 1, 6), latents[0][..., 4:, :])
    assert torch.equal(cut.whole(bands), flat)
