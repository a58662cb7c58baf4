"""The table of published layouts without a ComfyUI: which files are opened, what is left out, and what is refused."""

import pytest

from parallel_backend.checkpoints.checkpoint import open_own_class
from testing import mini
from tests.checkpoints.published_layouts import CONFIG, LAYOUTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if not each.by_comfyui], ids=lambda each: each.name)
def test_a_published_layout_is_opened_or_refused(folder, layout):
    path = layout.save(folder)
    try:
        if layout.refused:
            with pytest.raises(ValueError, match=f"model_name: .*{layout.refused}"):
                open_own_class(path, mini.proven(CONFIG))
        else:
            assert set(open_own_class(path, mini.proven(CONFIG)).unused) == set(layout.unused)
    finally:
        path.unlink()
