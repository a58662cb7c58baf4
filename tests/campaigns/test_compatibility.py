"""The campaign of nodes: all of ComfyUI's own nodes from end to end."""

import json

import pytest

from tests.campaigns.compatibility.runner import DIFFERS, FAILED, run_all
from tests.comfyui.conftest import comfyui  # noqa: F401 (a fixture)


@pytest.mark.full
@pytest.mark.comfyui
def test_comfyuis_own_nodes_do_what_they_do_natively(comfyui, tmp_path):  # noqa: F811
    verdicts = list(run_all(comfyui, tmp_path))
    bad = [verdict.as_json() for verdict in verdicts if verdict.outcome in (DIFFERS, FAILED)]
    assert not bad, json.dumps(bad, indent=1)
    assert len(verdicts) > 300
