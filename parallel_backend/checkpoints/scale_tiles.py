"""Scales of blocks in the order in which tensor cores read them, as nvfp4 and mxfp8 files have them."""

import torch

TILE = 128, 4
"""Rows and columns of scales in a tile."""


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of [rows, columns] scales, padded to whole tiles."""
    return -(-rows // TILE[0]) * TILE[0], -(-columns // TILE[1]) * TILE[1]


def untiled(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales in tiles -> [rows, columns].

    A tile of 128 x 4 holds the four scales of row r, then of r + 32, r + 64, r + 96, then those of row r + 1: cuBLAS'
    layout of block scaling factors (docs.nvidia.com/cuda/cublas).
    """
    height, width = tiled_shape(rows, columns)
    parts = tiles.view(torch.uint8).reshape(height // 128, width // 4, 32, 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(height, width)[:rows, :columns].contiguous().view(tiles.dtype)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] scales -> `tiled_shape`, with zeros at the ends: the inverse of `untiled`."""
    height, width = tiled_shape(*scales.shape)
    padded = torch.zeros(height, width, dtype=torch.uint8, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    parts = padded.view(height // 128, 4, 32, width // 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(height, width).view(scales.dtype)
