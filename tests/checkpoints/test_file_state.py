"""A file that is another one than before is noticed, whatever it is made to look like."""

import os
import time

import pytest

from testing import mini

WORDS = r"^model_name: model\.safetensors was (overwritten, replaced or cut on|removed from) disk while it was in use"


@pytest.mark.parametrize("change", ["overwritten", "replaced", "cut", "gone"])
def test_a_file_that_has_changed_is_not_read(mini_file, tmp_path, change):
    """With as many bytes as before, or fewer; also by ranks that open it after the client."""
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    content, now = mini_file.read_bytes(), time.time_ns()
    for file in (path, other):
        file.write_bytes(content)
    os.utime(path, ns=(now, now - 10**9))
    checkpoint = mini.opened(path)
    checkpoint.check_unchanged()
    changes = {
        "overwritten": lambda: path.write_bytes(content),
        "replaced": lambda: other.replace(path),
        "cut": lambda: os.truncate(path, 100),
        "gone": path.unlink,
    }
    changes[change]()
    with pytest.raises(ValueError, match=WORDS):
        checkpoint.check_unchanged()
    if change in ("overwritten", "replaced"):
        again = mini.opened(path)
        again.check_unchanged()
        with pytest.raises(ValueError, match=WORDS):
            again.check_unchanged(checkpoint.file_state)


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
    with pytest.raises(ValueError, match=WORDS):
        checkpoint.check_unchanged()
    path.unlink()
    assert not checkpoint.has_changed, "it may be back soon"
