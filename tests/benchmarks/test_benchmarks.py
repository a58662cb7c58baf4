"""Every part of the benchmark suite runs and says what it should, on models so small that its seconds mean nothing."""

import functools
import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks.harness import measuring, render
from benchmarks.harness.measuring import Outcome
from benchmarks.harness.subjects import FLUX_LIKE, FLUX_SCHNELL, GUIDED_FLUX_LIKE
from benchmarks.rivals import field, peers
from benchmarks.speed import first_picture, growth, offload, one_device, overheads, two_ranks

SMALL = {"width": 32, "axes": (4, 6, 6), "double_blocks": 1, "single_blocks": 1}
FLUX = replace(FLUX_LIKE, config=FLUX_LIKE.config | SMALL, side=16, text=4, steps=3)
GUIDED = replace(GUIDED_FLUX_LIKE, config=FLUX.config, side=16, text=4, steps=3)
GUIDED_CASES = [two_ranks.PLAIN_LOOP, "one rank", "pipefusion M=2", "split batch"]
FLUX_CASES = [
    *(two_ranks.PLAIN_LOOP, two_ranks.PLAIN_TWICE, "one rank", "one rank, 2 pictures", "split batch, 2 pictures"),
    *("pipefusion M=2", "displaced", "naive", *two_ranks.DIFFUSERS, *two_ranks.XDIT),
]


@pytest.fixture(scope="module")
def own_pools(pools):
    """The session's pools, on which the suite loads models of its own."""

    def pool(world: int):
        pools.forget(world)
        return pools(world)

    return pool


@pytest.fixture
def said():
    return []


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def measured_growth(own_pools, results) -> dict:
    """A result, kept among the others."""
    result = growth.run(1, lambda line: None, FLUX, sides=(8,), steps=(2, 3), ranks=(1, 2), pools=own_pools)
    measuring.keep(result, results, "test")
    return result


@pytest.mark.parametrize("subject", [pytest.param(FLUX, marks=pytest.mark.slow), GUIDED], ids=["flux", "guided"])
def test_all_competitors_compute_the_same(subject, own_pools, said, results):
    """Every exact mode, whoever's, ends with the plain loop's sample; the others with another one."""
    mine = FLUX_CASES if subject is FLUX else GUIDED_CASES
    result = two_ranks.run(subject, 1, said.append, only=mine, pools=own_pools)
    cases = result["cases"]
    assert set(cases) == {name for name in mine if name not in two_ranks.XDIT}
    assert all("xdit-python" in result["left_out"][name] for name in result["left_out"])
    approximate = {"pipefusion M=2", "pipefusion M=4", "displaced", "naive"}
    compared = {name: case for name, case in cases.items() if "exact" in case}
    assert {name for name, case in compared.items() if not case["exact"]} == approximate & compared.keys()
    assert all(case["seconds"]["median"] > 0 and case["cpu_seconds_by_rank"] for case in cases.values())
    assert all(case["peak_MB_by_rank"][0] > 50 for case in cases.values())
    assert cases["pipefusion M=2"]["sent_MB_per_step"]["pipe"] > 0
    assert str(subject.tokens) in result["model"] and "transformer" in result["scope"]
    measuring.keep(result, results, "test")


def test_overheads(own_pools, said, results):
    result = overheads.run(1, said.append, FLUX, FLUX, calls=4, prompts=2, pools=own_pools)
    assert {name.split(",")[0] for name in result["overheads"]} == set(overheads.LIMITS_MS)
    assert all(0 < row["median_ms"] <= row["most_ms"] for row in result["overheads"].values())
    measuring.keep(result, results, "test")


def test_growth(measured_growth):
    curves = measured_growth["curves"]
    assert [point["tokens"] for point in curves["tokens"]["ulysses"]] == [16]
    assert [point["steps"] for point in curves["steps"]["one rank"]] == [2, 3]
    assert [len(point["cpu_seconds_by_rank"]) for point in curves["ranks"]["ulysses"]] == [2]


def test_the_fields_cases(own_pools, said, results):
    two = ["one rank", "pipefusion 2", "ulysses 2", "split batch 2"]
    result = field.run("field-flux", 1, said.append, only=two, subject=GUIDED, side=8, pools=own_pools)
    assert set(result["cases"]) == set(two) and "64 instead of 128 pixels" in result["model"]
    assert result["cases"]["ulysses 2"]["exact"] and not result["cases"]["pipefusion 2"]["exact"]
    measuring.keep(result, results, "test")


def test_the_fields_shapes_are_the_real_ones():
    assert (FLUX_SCHNELL.tokens, FLUX_SCHNELL.width, FLUX_SCHNELL.blocks) == (4096, 3072, (19, 38))
    assert {mode.degrees.world for mode in field.degrees(True).values()} == {1, 2, 4, 8}
    reduced = FLUX_SCHNELL.at(layers=8, side=16)
    assert reduced.blocks == (2, 6) and "8 of 57 blocks, 128 instead of 1024 pixels" in str(reduced)
    narrow = FLUX_SCHNELL.at(heads=8)
    assert narrow.width == 1024 and "8 of 24 heads" in str(narrow)
    assert "reduced" not in str(FLUX_SCHNELL.at(layers=57, side=128))


def test_one_device(own_pools, said, results):
    result = one_device.run(1, said.append, "cpu", FLUX, sides=(16,), steps=3, pools=own_pools)
    (size,) = result["sizes"]
    assert size["relative_difference"] < 1e-5
    bands = size["seconds"]["backend: 4 bands of a step"]["median"]
    assert size["ratios"]["bands of a step over a whole step"]["median"] == pytest.approx(
        bands / size["seconds"]["backend: forward"]["median"], rel=0.05
    )
    measuring.keep(result, results, "test")


@pytest.mark.processes
@pytest.mark.full
def test_first_picture_with_a_vae(said, results):
    modes = {"one rank": first_picture.MODES["one rank"]}
    result = first_picture.run(1, said.append, True, GUIDED, modes)
    for case in result["cases"].values():
        assert tuple(case) == first_picture.PARTS + first_picture.VAE_PARTS
        parts = {name: figures["median"] for name, figures in case.items()}
        assert parts["first picture, from nothing"] > parts["start"] + parts["load"] > 0
    measuring.keep(result, results, "test")


def test_a_table_and_plots_come_of_the_results_alone(results, measured_growth, tmp_path):
    """Of all that the tests before have measured; of one of them at least."""
    kept = list(results.glob("*.json"))
    assert kept
    page = tmp_path / "benchmarks.md"
    render.render(results, page, tmp_path / "images")
    text = page.read_text()
    for path in kept:
        result = json.loads(path.read_text())
        assert result["model"] in text and path.name in text
    for line in text.splitlines():
        if "](images/" in line:
            assert (tmp_path / line.split("](")[1].rstrip(")")).stat().st_size > 1000
    assert "nan" not in text


@pytest.mark.parametrize(("stolen", "said"), [(0.0, False), (0.5, True)])
def test_a_result_of_a_shared_machine_says_so(measured_growth, tmp_path, stolen, said):
    measuring.keep(measured_growth | {"stolen": stolen}, tmp_path / "results", "test")
    render.render(tmp_path / "results", tmp_path / "page.md", tmp_path / "images")
    assert ("host took 50% of its cores' time" in (tmp_path / "page.md").read_text()) == said


def test_stolen_time_is_a_share_of_the_cores_time_since_the_start(monkeypatch):
    times = namedtuple("times", ["user", "idle", "steal", "guest"])
    now = iter([times(10.0, 10.0, 100.0, 5.0), times(14.0, 12.0, 102.0, 9.0)])
    monkeypatch.setattr(measuring.psutil, "cpu_times", lambda: next(now))
    assert measuring.Stolen().share() == pytest.approx(2.0 / 8.0)


def test_a_missing_peer_is_named():
    with pytest.raises(peers.PeerFailed, match="no --xdit-python"):
        peers.xdit_version(None)
    with pytest.raises(peers.PeerFailed, match="does not exist"):
        peers.xdit_version(Path("/nowhere/python"))


def test_figures():
    slow, fast = ([Outcome(seconds, torch.empty(0)) for seconds in values] for values in ((2.0, 6.0, 3.0), (1.0, 2.0, 2.0)))
    assert measuring.ratios(slow, fast) == [2.0, 3.0, 1.5]
    assert measuring.figure(measuring.ratios(slow, fast))["median"] == 2.0
    assert two_ranks.bound("pipefusion M=2", 20) == pytest.approx(1 / (0.05 + 0.95 / 2))
    assert two_ranks.bound("ulysses", 20) == 2.0
    assert measuring.readable({"a": [1, 2], "b": {"c": [3.5]}}).splitlines()[1] == ' "a": [1, 2],'


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        suite.parse(["--only", "flux,nonsense"])
    assert "nonsense" in capsys.readouterr().err
    assert suite.parse(["--quick"]).rounds == 1


@pytest.mark.slow
def test_weights_that_are_streamed_cost_what_is_predicted_of_them(thread_pools, said):
    """The figures of the emulation; its seconds mean nothing here."""
    config = FLUX.config | {"single_blocks": 7}
    start = thread_pools.start
    result = offload.run(
        replace(FLUX, config=config), 400_000, 1, said.append, start, lambda device: functools.partial(start, device=device)
    )
    assert set(result["modes"]) == set(offload.MODES)
    for mode in result["modes"].values():
        assert mode["equal"] and mode["within_budget"]
        assert mode["seconds_all_there"]["median"] <= mode["predicted"] <= mode["predicted_most"]
    streamed = {name: sum(mode["MB_per_step_by_rank"]) for name, mode in result["modes"].items()}
    assert streamed["ulysses"] > streamed["tensor"] and streamed["pipefusion M=4"] > streamed["pipefusion M=2"]
