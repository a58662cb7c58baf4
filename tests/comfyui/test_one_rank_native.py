"""The benchmark of one rank against ComfyUI's own model runs, on a model so small that its seconds mean nothing."""

from dataclasses import replace

import pytest

from benchmarks.speed import one_rank_native

pytestmark = [pytest.mark.comfyui, pytest.mark.full]


def test_both_compute_the_same_and_the_ratio_is_theirs(comfyui):
    small = {"flux": replace(one_rank_native.SUBJECTS["flux"], latent=(16, 8, 8))}
    lines = []
    result = one_rank_native.run(2, 3, lines.append, comfyui.checkout, small, ("fp32", "bf16", "nvfp4"))
    assert list(result["cases"]) == ["flux, fp32", "flux, bf16", "flux, nvfp4"] and len(lines) == 3
    exact, rounded, packed = result["cases"].values()
    assert exact["relative_difference"] < 1e-6 > packed["relative_difference"]
    assert 1e-6 < rounded["relative_difference"] < 0.05  # both are computed in bf16
    for case in result["cases"].values():
        ours, theirs = (case[f"{name}_seconds"]["rounds"] for name in ("rank", "native"))
        ratios = [rank / native for rank, native in zip(ours, theirs, strict=True)]
        assert case["ratio"]["rounds"] == pytest.approx(ratios, abs=0.02, rel=0.02)
        assert case["kept"] == (case["ratio"]["median"] <= one_rank_native.LIMIT)
