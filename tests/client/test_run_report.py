"""The report's figures are sums over the ranks."""

import dataclasses
from types import SimpleNamespace

import pytest

from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.core.degrees import Degrees


def rank(number: int, **bytes_sent: int) -> SimpleNamespace:
    return SimpleNamespace(
        rank=number,
        micro_steps=8,
        compute_seconds=3.0,
        wait_seconds=1.0,
        transfer_seconds=4.0,
        bytes_sent=bytes_sent,
        buffer_bytes=5_000_000,
        peak_bytes=2_000_000_000,
        graphs=number,
        attention="flash-attn" if number else "",
        arithmetic="" if number else "int8 multiplied",
        streamed_bytes=number * 10**9,
        streaming_wait_seconds=0.75 * number,
        replayed=2 * number,
        without_graphs="" if number else "SageAttention cannot be captured",
    )


RANKS = (rank(0, pipe=3_000_000, ulysses=1_000_000), rank(1, ulysses=2_000_000), rank(2, pipe=4_000_000))


PIPELINE = Degrees(pipe=2, ulysses=2)


def report(degrees=PIPELINE, exact_calls=1, reason=None, ranks=RANKS) -> RunReport:
    return RunReport(degrees, 4, 4, 2.0, exact_calls, reason, ranks)


def test_bytes_are_of_all_ranks_by_axis():
    assert report().bytes_sent == {"pipe": 7_000_000, "ulysses": 3_000_000}
    text = str(report())
    assert "moved between ranks: pipe 7.0 MB, ulysses 3.0 MB (2.50 MB per step)" in text
    assert text.startswith(
        "pipefusion_degree 2 x ulysses_degree 2\n2.0 s, 0.50 s a step\nclose to exact: 4 patches, warm-up 1\n"
    )
    assert "blocked in transfers: 25 % of the ranks' working time; 75 % of the transfers' time was hidden" in text
    assert "compiled: 2 graphs" in text
    assert "CUDA graphs: 6 of 24 micro-steps on all ranks were replays" in text
    assert "CUDA graphs: none, because SageAttention cannot be captured\n" in text
    assert "streamed from host memory: 3.00 GB (0.75 GB per step), waited for 2.25 s, 20 % of the ranks" in text
    assert "attention: flash-attn\n" in text
    assert text.count("weights: int8 multiplied\n") == 1
    assert "rank 1: 8 micro-steps, computing 3.00 s, K/V buffers 5.0 MB, peak memory 2.00 GB" in text


@pytest.mark.parametrize(
    ("run", "how"),
    [
        ({}, "close to exact: 4 patches, warm-up 1"),
        ({"exact_calls": 2}, "close to exact: 4 patches, warm-up 2"),
        ({"exact_calls": None}, "exact, on 4 ranks"),
        ({"exact_calls": None, "degrees": Degrees()}, "exact, on 1 rank"),
        ({"exact_calls": None, "transfer_dtype": "int8"}, "close to exact: packed transfers"),
        ({"degrees": Degrees(patch=2, patch_mode="displaced")}, "close to exact: patches, warm-up 1"),
        ({"degrees": Degrees(patch=2, patch_mode="naive")}, "naive patches, for comparison"),
    ],
    ids=str,
)
def test_the_node_shows_how_and_how_long(run, how):
    shown = dataclasses.replace(report(), **run).shown
    assert shown == ("2.0 s, 0.50 s a step", how)
    assert all(len(line) <= 38 for line in (f"Parallel DiT: {shown[0]}", how)), "what a sampler's node shows of a line"


def test_the_node_shows_what_a_user_should_know_on_lines_of_its_own():
    run = dataclasses.replace(report(exact_calls=None, reason="of a mask"), cache="step cache: 3 of 4", notes=("P2P off",))
    assert run.shown[2:] == ("not in patches: of a mask", "step cache: 3 of 4", "P2P off")
