"""Values of safetensors files: the same as the package's own, from files that are larger than the memory too."""

import json
import struct

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints import tensor_files
from parallel_backend.checkpoints.tensor_files import MappedFile, read_header

DTYPES = [dtype for dtype in tensor_files.DTYPES.values() if dtype != torch.bool]


def test_values_are_those_of_the_package(tmp_path):
    path = tmp_path / "all.safetensors"
    random = torch.Generator().manual_seed(1)
    tensors = {
        str(dtype): torch.randint(0, 256, (3, 5, dtype.itemsize), dtype=torch.uint8, generator=random).view(dtype)
        for dtype in DTYPES
    }
    tensors |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    save_file(tensors, path, {"format": "pt"})
    expected = load_file(path)
    file, entries = MappedFile(path), read_header(path).entries
    for key, value in expected.items():
        found = file.tensor(entries[key])
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_a_file_may_be_larger_than_the_memory(tmp_path):
    path, rows = tmp_path / "large.safetensors", 2 * (psutil.virtual_memory().total + psutil.swap_memory().total) // 1024
    header = {"weight": {"dtype": "BF16", "shape": [rows, 512], "data_offsets": [0, 1024 * rows]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 1024 * rows)  # a hole, which takes no room on the disk
    part = MappedFile(path).tensor(read_header(path).entries["weight"])[rows - 2 :]
    assert part.shape == (2, 512)
    assert not part.any()


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path):
    path = tmp_path / "cut.safetensors"
    save_file({"weight": torch.ones(5000)}, path)
    entry = read_header(path).entries["weight"]
    with path.open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(ValueError, match=r"^model_name: cut\.safetensors became shorter"):
        MappedFile(path).tensor(entry)
