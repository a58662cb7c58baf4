"""Tiles that ranks compute for ComfyUI's own class of VAE."""

import gc
import weakref

import pytest
import torch


@pytest.fixture
def tiles(module):
    return module("vae.tiles")


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


class Model(torch.nn.Module):
    """The functions of ComfyUI's MiniMaxH3VideoVAE that tiles.py uses, for images of four rows and columns of tiles."""

    clip_length = 2
    group = 1
    """Tiles that it asks for together: up to four from ComfyUI 0.36 on."""
    made: list[weakref.ref]

    def _normalize_pixels(self, pixels):
        return pixels

    def split_tiles(self, size):
        return [size // 4 * index for index in range(4)], [size // 4] * 4, [0] * 3

    def _encode_moments(self, tile):
        raise AssertionError("tiles are for the ranks")

    def tiled_encode(self, clip):
        return torch.cat([torch.cat(list(self._row(row)), -1) for row in clip.chunk(4, -2)], -2)

    def _row(self, row):
        tiles = row.chunk(4, -1)
        for start in range(0, 4, self.group):
            asked = tiles[start : start + self.group]
            yield from self._encode_moments(torch.cat(asked)).chunk(len(asked))

    def tiled_decode(self, clip):
        raise AssertionError("only encoded here")

    def encode(self, pixels):
        self.made.append(weakref.ref(self))
        return torch.cat([self.tiled_encode(clip) for clip in pixels.split(self.clip_length, dim=2)], dim=2)


class Ranks:
    """RemoteVAE.run_tiles, which doubles each value."""

    ended = False

    def run_tiles(self, clips):
        try:
            for each in clips:
                yield 2 * each
        finally:
            self.ended = True


def cancel():
    raise KeyboardInterrupt


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_the_ranks_end_with_the_picture(tiles, no_collection, group):
    model, ranks, pixels = Model(), Ranks(), torch.arange(256.0).reshape(1, 1, 4, 8, 8)
    model.made, model.group = [], group
    assert torch.equal(tiles.encode_in_tiles(model, pixels, ranks.run_tiles, lambda: None), 2 * pixels)
    assert ranks.ended
    assert model.made[0]() is None, "the copy of the model is still there"


def test_the_ranks_end_with_a_cancelled_picture(tiles, no_collection):
    model, ranks = Model(), Ranks()
    model.made = []
    with pytest.raises(KeyboardInterrupt):
        tiles.encode_in_tiles(model, torch.zeros(1, 1, 4, 4, 4), ranks.run_tiles, cancel)
    assert ranks.ended
