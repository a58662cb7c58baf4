"""scripts/one_gpu: its parts end at their limits, and each leaves its result before the next one begins."""

import json
import time

import pytest
import torch

from benchmarks.one_gpu.__main__ import NO_DEVICE, PROBES, main
from benchmarks.one_gpu.frame import CUT, DONE, FAILED, LEFT_OUT, Part, run_parts

WRITES = 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\'{"summary": "it is"}\'); '
CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
LACKS = 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\'{"lacks": "a card"}\')'
PARTS = (
    Part("hangs with a child", 1.5, ("-c", WRITES + CHILD + "import time; time.sleep(60)", "{out}")),
    Part("fails", 30, ("-c", "print('why it fails'); sys.exit(3)")),
    Part("is left out", 30, ("-c", "0"), lacks="no card"),
    Part("says what it lacks", 30, ("-c", LACKS, "{out}")),
    Part("writes", 30, ("-c", WRITES + "import os; assert os.environ['GIVEN'] == 'a'", "{out}"), {"GIVEN": "a"}),
)


def test_a_part_that_hangs_is_cut_and_the_next_one_runs(tmp_path):
    kept: list[dict] = []
    began = time.monotonic()
    results = run_parts(PARTS, tmp_path, 60, lambda results: kept.append(json.loads(json.dumps(results))))
    assert time.monotonic() - began < 30
    assert [one["status"] for one in results.values()] == [CUT, FAILED, LEFT_OUT, LEFT_OUT, DONE]
    assert [len(each) for each in kept] == [1, 2, 3, 4, 5]  # a run that is cut leaves the parts before
    hangs, fails, _, lacks, writes = results.values()
    assert hangs["summary"] == "it is"  # written before it was cut
    assert "why it fails" in fails["output"]
    assert lacks["why"] == "a card"
    assert writes["result"] == {"summary": "it is"}


def test_all_parts_together_have_a_limit(tmp_path):
    sleeps = [Part(name, 1.0, ("-c", "import time; time.sleep(60)")) for name in ("first", "second")]
    results = run_parts(sleeps, tmp_path, 1.5, lambda results: None)
    assert [one["status"] for one in results.values()] == [CUT, LEFT_OUT]
    assert results["second"]["why"] == "no time is left for it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_each_part_says_so_and_none_ran(tmp_path, capsys):
    assert main(["--folder", str(tmp_path), "--out", str(tmp_path / "result.json")]) == 1
    parts = json.loads((tmp_path / "result.json").read_text())["parts"]
    assert {name: one["why"] for name, one in parts.items()} == {probe.name: NO_DEVICE for probe in PROBES}
    assert all(f"{probe.name}: {LEFT_OUT}, {NO_DEVICE}" in capsys.readouterr().out for probe in PROBES[:1])


def test_limits_together_are_a_quarter_of_an_hour():
    assert sum(probe.seconds for probe in PROBES) <= 15 * 60
