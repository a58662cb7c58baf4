"""A file that is another one than before is noticed, whatever it is made to look like."""

import os

import pytest

from testing import mini


def test_another_file_of_the_same_size_and_time_is_another_file(mini_file, tmp_path):
    """As `cp -p`, `rsync -t` and unpacking an archive leave it: fine-tuned models of one kind have the same size."""
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    path.write_bytes(mini_file.read_bytes())
    mini.save(mini.random_model(seed=1), other)
    now = path.stat()
    checkpoint = mini.opened(path)
    assert not checkpoint.has_changed
    path.read_bytes()
    assert not checkpoint.has_changed, "reading is no change"
    os.utime(other, ns=(now.st_atime_ns, now.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (now.st_size, now.st_mtime_ns)
    assert checkpoint.has_changed
    with pytest.raises(ValueError, match=r"^model_name: model\.safetensors was overwritten, replaced or cut on disk"):
        checkpoint.check_unchanged()
    path.unlink()
    assert not checkpoint.has_changed, "it may be back soon"
    with pytest.raises(ValueError, match=r"^model_name: model\.safetensors was removed from disk while it was in use"):
        checkpoint.check_unchanged()
