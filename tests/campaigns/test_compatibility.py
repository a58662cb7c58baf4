"""The campaign of nodes: what it makes of trials, and all of ComfyUI's own nodes from end to end."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.campaigns.compatibility import verdict as of
from tests.campaigns.compatibility.runner import MODELS, PackSession, save_models
from tests.campaigns.compatibility.verdict import BAD, MODES, NATIVE, judge
from tests.comfyui.conftest import comfyui  # noqa: F401 (a fixture)

ABOUT = ("core", "SkipLayerGuidanceDiT", "Skip Layer Guidance (DiT)", "flux")
RIGHT = {"difference": 1e-7}
OURS = {"type": "ValueError", "ours": True, "node": "KSampler", "traceback": ""}


def trial(mode, outcome, after=RIGHT):
    return {"mode": mode, "outcome": outcome, "after": after}


def trials(**changes):
    """Everything equal, and pipelined in the last mode, but for `changes`: mode -> outcome."""
    found = {NATIVE: trial(NATIVE, {"finite": True, "effect": 0.1})}
    found |= {mode: trial(mode, {"difference": 1e-6, "psnr": 120.0, "whole": None}) for mode in MODES}
    found[MODES[3]]["outcome"] = {"difference": 0.1, "psnr": 30.0, "whole": None}
    return found | {mode: trial(mode, outcome) for mode, outcome in changes.items()}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, of.CLOSE),
        ({MODES[3]: {"difference": 1e-6, "psnr": 120.0, "whole": "it looks at the whole"}}, of.WHOLE),
        ({MODES[3]: {"difference": 0.9, "psnr": 8.0, "whole": None}}, of.WRONG),
        ({MODES[0]: {"difference": 1e-3, "psnr": 60.0}}, of.WRONG),
        ({MODES[0]: {"difference": 1e-3, "psnr": 60.0, "itself": 3e-4}}, of.CLOSE),
        ({MODES[1]: {"error": OURS | {"text": "model: Skip Layer Guidance is not possible."}}}, of.REFUSED),
        ({MODES[1]: {"error": OURS | {"text": "model: a wrapper is not possible."}}}, of.UNNAMED),
        ({MODES[1]: {"error": OURS | {"type": "KeyError", "text": "'x'"}}}, of.CRASH),
        ({NATIVE: {"error": OURS | {"text": "no such layer"}}}, of.NOT_THESE),
    ],
)
def test_a_node_is_what_it_is_in_its_worst_mode(changes, outcome):
    assert judge(ABOUT, trials(**changes)).outcome == outcome


@pytest.mark.full
@pytest.mark.comfyui
@pytest.mark.processes
def test_comfyuis_own_nodes_do_what_they_do_natively(comfyui, tmp_path):  # noqa: F811
    save_models(tmp_path, comfyui)

    def run(model: str) -> list:
        with contextlib.closing(PackSession(comfyui, tmp_path, None)) as session:
            return list(session.run(session.nodes, model))

    with ThreadPoolExecutor(2) as pool:
        verdicts = [verdict for found in pool.map(run, MODELS) for verdict in found]
    bad = [verdict.as_json() for verdict in verdicts if verdict.outcome in BAD or verdict.after]
    assert not bad, json.dumps(bad, indent=1)
    assert len(verdicts) > 300
