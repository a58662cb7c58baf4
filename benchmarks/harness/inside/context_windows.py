"""Seconds of KSampler with ComfyUI's Wan Context Windows, windows together and one by one, in turn. Run by serve.py, for
benchmarks/speed/context_windows.py."""

import time
from unittest.mock import patch

import small_models
from boot import Results, comfy, difference, ksampler, parallel, torch
from comfy_extras.nodes_context_windows import WanContextWindowsManualNode
from small_cases import small

NAME, FRAMES, SIDE = "wan-windows", 22, 24
ROW = small_models.small_model("wan-2.1-t2v")
KIND = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE


def main(results: Results, cases: dict[str, dict], steps: int, rounds: int) -> None:
    """`cases`: arguments of `parallel` by name, with "cfg", and with "together" false for one window after the other."""
    row = ROW | {"arguments": ROW["arguments"] | {"num_layers": 4}}
    one_thread = patch("parallel_backend.client.pools.usable_cores", lambda: 1)
    with patch.dict(small_models._ROWS, {NAME: row}), small(NAME), one_thread:
        expected: dict[float, torch.Tensor] = {}
        for number in range(rounds):
            for name, case in cases.items():
                results.case(f"{name}, round {number}", lambda case=dict(case): _timed(case, steps, expected))


def _timed(case: dict, steps: int, expected: dict[float, torch.Tensor]) -> dict[str, float]:
    """Seconds of a run after a rehearsal of a step, and the largest difference from the first case of this cfg."""
    cfg, together = case.pop("cfg"), case.pop("together")
    model = WanContextWindowsManualNode.execute(
        parallel(f"{NAME}.safetensors", **case), 21, 8, "standard_static", 1, False, "pyramid", True
    ).args[0]
    if not together:
        model.remove_wrappers_with_key(KIND, "parallel_dit_concurrent_conds")
    prompts, latent = small_models.prompts("wan-2.1-t2v"), torch.zeros(1, 16, FRAMES, SIDE, SIDE)
    ksampler(model, prompts, latent, steps=1, cfg=cfg)
    began = time.perf_counter()
    samples = ksampler(model, prompts, latent, steps=steps, cfg=cfg)
    seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 2), "difference": difference(samples, expected.setdefault(cfg, samples))}
