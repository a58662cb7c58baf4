"""Every part of the benchmark suite runs and says what it should, on models so small that its seconds mean nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import measuring, render
from benchmarks.harness.subjects import FLUX_LIKE, GUIDED_FLUX_LIKE
from benchmarks.speed import growth, one_device, two_ranks

SMALL = {"width": 32, "axes": (4, 6, 6), "double_blocks": 1, "single_blocks": 1}
FLUX = replace(FLUX_LIKE, config=FLUX_LIKE.config | SMALL, side=16, text=4, steps=3)
GUIDED = replace(GUIDED_FLUX_LIKE, config=FLUX.config, side=16, text=4, steps=3)
GUIDED_CASES = [two_ranks.PLAIN_LOOP, "one rank", "pipefusion M=2", "split batch"]


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


def test_all_competitors_compute_the_same(own_pools, said, results):
    """Every exact mode, whoever's, ends with the plain loop's sample; the others with another one."""
    result = two_ranks.run(GUIDED, 1, said.append, only=GUIDED_CASES, pools=own_pools)
    cases = result["cases"]
    assert set(cases) == set(GUIDED_CASES)
    compared = {name: case["exact"] for name, case in cases.items() if "exact" in case}
    assert compared == {name: name != "pipefusion M=2" for name in compared}
    assert cases["pipefusion M=2"]["sent_MB_per_step"]["pipe"] > 0
    measuring.keep(result, results, "test")


def test_growth(measured_growth):
    curves = measured_growth["curves"]
    assert [point["tokens"] for point in curves["tokens"]["ulysses"]] == [16]
    assert [point["steps"] for point in curves["steps"]["one rank"]] == [2, 3]
    assert [len(point["cpu_seconds_by_rank"]) for point in curves["ranks"]["ulysses"]] == [2]


def test_one_device(own_pools, said, results):
    result = one_device.run(1, said.append, "cpu", FLUX, sides=(16,), steps=3, pools=own_pools)
    (size,) = result["sizes"]
    assert size["relative_difference"] < 1e-5
    bands = size["seconds"]["backend: 4 bands of a step"]["median"]
    assert size["ratios"]["bands of a step over a whole step"]["median"] == pytest.approx(
        bands / size["seconds"]["backend: forward"]["median"], rel=0.05
    )
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
