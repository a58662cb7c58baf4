"""The tables of benchmarks/results/self_tests.md: made of committed self-tests and of one that a user may send."""

import json

import jsonschema
import pytest

from benchmarks.harness.acceptance_table import BEGIN, END, main, read, render
from benchmarks.harness.render import ROOT
from parallel_backend.acceptance.report import FORMAT, SCHEMA, VERSION, dumps

RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "self_tests.md"


def check(name: str, **figures) -> dict:
    return {"name": name, "status": "passed", "figures": figures}


GPU = {"name": "NVIDIA L4"}
USERS = {
    "format": FORMAT,
    "version": VERSION,
    "date": "2027-01-02T03:04:05Z",
    "devices": ["cuda:0", "cuda:1"],
    "summary": {"passed": 12, "failed": 1, "not looked at": 0},
    "checks": [
        check("system", gpus=[GPU, GPU], libraries={"torch": "2.13.0"}, cuda="13.0", nccl="2.28", transport="nccl"),
        check("links", links={"between": {"0-1": {"GB_per_s": 11.5, "us": 21.0}}, "crowding": 1.1}),
        check(
            "model file",
            file="flux1-dev.safetensors",
            weight_dtype="bf16",
            latent=[1, 16, 128, 128],
            runs=[
                {"mode": "ComfyUI 0.33.0, no ranks", "seconds_per_step": 1.2},
                {"mode": "one rank", "seconds_per_step": 1.0, "peak_bytes": [24_000_000_000], "dB": 41.0},
                {"mode": "ulysses_degree 2", "seconds_per_step": 0.625, "peak_bytes": [25 * 10**9, 24 * 10**9], "dB": 40.5},
            ],
        ),
    ],
}


def test_committed_results_are_of_the_schema_and_the_page_is_made_of_them():
    found = sorted(RESULTS.glob("acceptance_*.json"))
    assert found
    for path in found:
        jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
        assert path.stem.rsplit("_", 1)[1] == read(path)["date"][:10]
    assert render(RESULTS, PAGE) == PAGE.read_text()


def test_a_users_result(tmp_path):
    (tmp_path / "acceptance_2xL4_2027-01-02.json").write_text(dumps(USERS))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # making it again changes nothing
        main(["--results", str(tmp_path), "--page", str(page)])
        text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert (
        "| 2 x NVIDIA L4 | nccl, torch 2.13.0, CUDA 13.0, NCCL 2.28 | 12, 1, 0 | 11.5 GB/s, 21.0 us | "
        "[2027-01-02](acceptance_2xL4_2027-01-02.json) |"
    ) in text
    model = "flux1-dev.safetensors (bf16), latent 16 x 128 x 128"
    assert f"| {model} | 2 x NVIDIA L4 | ulysses_degree 2 | 0.625 | 1.60x | 25.0 | 40.5 |" in text
    assert f"| {model} | 2 x NVIDIA L4 | ComfyUI 0.33.0, no ranks | 1.2 | 0.83x |  |  |" in text


@pytest.mark.parametrize("other", [{"format": "else"}, USERS | {"version": VERSION + 1}, []])
def test_other_files_are_refused(tmp_path, other):
    path = tmp_path / "acceptance_x_2027-01-02.json"
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="no result of the self-test"):
        read(path)
