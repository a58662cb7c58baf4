"""What the pack says on nodes and in a corner of ComfyUI's page, as examples, and its reasons as they stand in the code."""

import ast
import math
from collections.abc import Iterator
from dataclasses import replace

from parallel_backend.client.reports.run_report import RunReport
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.failure_text import NCCL_OFF, NVLINK_ALONE, P2P_OFF
from scripts.comfyui_server import PACK

_RUN = RunReport(Degrees(pipe=2), 4, 4, 2.0, 1, None, ())
_RUNS = (
    replace(_RUN, exact_calls=2, gained="1.7 x one GPU"),
    replace(_RUN, exact_calls=None, reason="the conditioning has its own area", gained="0.9 x one rank"),
    replace(_RUN, exact_calls=None, cache="step cache: 14 of 20 model calls computed"),
    replace(_RUN, degrees=Degrees(patch=2, patch_mode="displaced")),
    replace(_RUN, expected_db=40.0),
    replace(_RUN, expected_db=math.inf),
    replace(_RUN, degrees=Degrees(patch=2, patch_mode="displaced"), expected_db=30.0),
    replace(_RUN, degrees=Degrees(patch=2, patch_mode="displaced"), expected_db=math.inf),
)
_RANKS = "3.2 of 12.1 GB on rank 0, 2.2 of 9.1 GB on rank 1, 4.0 of 8.1 GB on rank 3"
_HIDDEN = " ComfyUI was started with --cuda-device 0, which hides all other GPUs: restart it with no --cuda-device."
LINES = (
    *(line for run in _RUNS for line in run.shown),
    "left out, as in ComfyUI, because no part of the model uses them: 4 tensors (last.up.weight, a, b, ...)",
    "starting 2 ranks",
    "loading, 40 %",
    f"3.5 GB of weights on 2 ranks, weights streamed from host memory: {_RANKS}, {P2P_OFF}",
    f"3.5 GB of weights on 2 ranks, {NVLINK_ALONE}",
    f"3.5 GB of weights on 2 ranks, {NCCL_OFF}",
    "calibrating, about 10 s, once for this machine and kind of model",
    "degrees auto: ulysses_degree 2 on cuda:0, cuda:1, planned 8.1 s",
    "degrees auto: pipefusion_degree 2 on cuda:0, cuda:1, because HiDreamO1 cannot be timed",
    f"degrees auto has one device only.{_HIDDEN}",
    "ranks do not follow these start options of ComfyUI: --fp16-unet, --fast=cublas_ops",
    "pipefusion_degree 2, 4 patches would take about 8.1 s (see Parallel Doctor)",
    "trying ulysses_degree 2 for a few steps",
    "trying skipped blocks of AuraFlow, ComfyUI's own class, 45 %, 12 s",
    "trying AuraFlow, ComfyUI's own class, before its weights are loaded, 45 %, 12 s",
    "AuraFlow, ComfyUI's own class, verified: 36 of 36 blocks are shared out",
    "Flux, ComfyUI's own class, verified without its shipped plan, which is for other code: 57 of 57 blocks are shared out",
    "first step (each step copies 12.2 GB of weights to the devices), 7 s",
    "context windows: 4 at a time",
    "min_closeness was not used, because of a step cache, a ControlNet or a guidance node",
    "min_closeness was not used, because the run is exact",
    "step cache: every call is computed, because the conditioning has LoRAs of its own (hooks)",
    "split_batch_degree 2, but NAG needs both prompts in one call, so 1 of 2 copies of the model computes them. To "
    "split one image over GPUs, use pipefusion_degree or ulysses_degree instead.",
    "this LoRA asks for an attention kernel, and is used with that of the MODEL",
    "51 of 259 layers of this LoRA do not fit this model and are left out",
    "cuda:1 ran out of memory. One more try with new ranks: 2.5 GB more of rank 1's weights are streamed from host memory",
    "cuda:1 did not answer in step 17 of 20. The run goes on with cuda:0",
    "the ranks did not answer in step 17 of 20. The run goes on with cuda:0, cuda:1",
    "cuda:1 died in step 17 of 20. The run goes on with cuda:0",
    "cuda:1 failed in step 17 of 20. The run goes on with cuda:0",
    "step 17 of 20 was computed again, 34.0 s",
    "self-test FAILED: links, modes; 6 of 8 checks passed",
    "advice: stay on one GPU (cuda:0), 2.30 s",
    "advice: pipefusion_degree 2, 4 patches, 1.25 s, 1.84 x one device",
    "advice: nothing fits these devices. Use a smaller image, weight_dtype fp8_e4m3fn, or more devices with "
    "pipefusion_degree.",
    "with RTX 3060 12 GB, PCIe x4, predicted: nothing fits",
    "with RTX 3060 12 GB, PCIe x4, predicted: no gain",
    "with RTX 5090 32 GB, PCIe x8, predicted: RTX 5090 32 GB, 0.812 s a step, without it nothing fits",
    "with RTX 5090 32 GB, PCIe x8, predicted: pipefusion_degree 2, 4 patches, 0.812 s a step, without it nothing fits",
    "with NVIDIA GeForce RTX 4090, PCIe x8, predicted: ulysses_degree 2, 0.61 s a step, 1.83 x without it",
    "with NVIDIA GeForce RTX 4090, PCIe x8, predicted: pipefusion_degree 2, 4 patches, 0.61 s a step, 1.83 x without it",
    "Decoded in 2 parts on cuda:0, cuda:1.",
    "Decoded whole by ComfyUI, because there is only one device for it.",
)
"""Examples of lines on nodes, one of each form, without the pack's name in front of them."""

_LOADER = "Load Diffusion Model (flux1-dev.safetensors)"
_PLAN = (
    f"{_LOADER}: 23.8 GB of weights on cuda:0 (24.0 GB), cuda:1 (24.0 GB). Parallelize Model would split each image over "
    "the GPUs"
)
TOASTS = (
    "Run on several GPUs",
    "Move in from other packs",
    "This workflow has no node of ComfyUI-MultiGPU, raylight or SGLang.",
    "A new workflow has ComfyUI's own nodes in place of: RayUNETLoader; RayLoraLoader.",
    "UnetLoaderLP was left: this ComfyUI has no UnetLoaderLP.",
    "RayTorchCompileModel was removed: set `compile` on Parallel DiT Loader.",
    "RayTeaCache was removed: use Parallel Step Cache.",
    "RayCleanVRAMUsed was removed: ranks and ComfyUI make room for each other.",
    "DeviceSelectorMultiGPU was removed: ComfyUI's loaders choose the device.",
    "SGLDOptions was removed: set the number of GPUs and the mode on Parallelize Model.",
    "This workflow has no loader of a diffusion model.",
    f"ComfyUI shows one GPU on this machine.{_HIDDEN}",
    f"ComfyUI shows no GPU on this machine. To try it on the CPU, use Parallel DiT Loader with cpu,cpu as devices.{_HIDDEN}",
    "Nothing was changed: this editor would lose the wire to KSampler; Load LoRA. Please report it, and connect the nodes "
    "by hand.",
    f"Parallelize Model is now behind {_LOADER}, and Apply PipeFusion, because no GPU holds the whole model. Undo "
    "reverts it.",
    f"Not changed: {_LOADER}: its model file is unknown.",
    f"{_PLAN}; Apply PipeFusion would be added too, because the GPUs have no direct link (P2P): its first step is exact, "
    "and the others are close. warmup_steps makes more of them exact.",
    "Removed: Parallelize Model and Apply PipeFusion. Undo reverts it.",
    "Parallel DiT Loader was not removed: replace it by ComfyUI's own loader.",
)

_OTHER_REASONS = (
    "dpm_adaptive computes its step size from the whole latent",
    "ar_video computes one block of frames after the other",
    "another node calls the model for parts of the latent, or for several latents at a time",
    "there is only one device for it",
    "a device has less than the 1.5 GB that its part needs",
)
_GIVE_REASONS = (
    *("nodes/sampling/eligibility.py", "nodes/sampling/known_samplers.py", "nodes/model/call/concurrent_conds.py"),
    *("nodes/vae/known.py", "nodes/vae/rows.py", "nodes/vae/bands.py"),
    "parallel_backend/core/device_choice.py",
)
"""Their functions that return `str | None`, or whose name begins with `why`, return a reason for the user."""


def reasons() -> list[str]:
    """Every reason for the user, as it stands in the code, with 3 in each place that is filled in."""
    return sorted({*_OTHER_REASONS, *_not_local(), *(reason for path in _GIVE_REASONS for reason in _returned(path))})


def _returned(path: str) -> Iterator[str]:
    for function in _nodes(path, ast.FunctionDef):
        gives = function.returns is not None and "str" in ast.unparse(function.returns)
        if not gives or not ("None" in ast.unparse(function.returns) or function.name.startswith(("why", "_unknown"))):
            continue
        if function.name in ("region_of", "innermost"):  # a key, a sampler
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Return):
                yield from _text(node.value)


def _not_local() -> Iterator[str]:
    for path in PACK.glob("**/*.py"):
        if path.relative_to(PACK).parts[0] in ("nodes", "parallel_backend"):
            for call in _nodes(str(path), ast.Call):
                if isinstance(call.func, ast.Name) and call.func.id == "NotLocal":
                    yield from _text(call.args[0])


def _nodes(path: str, kind: type) -> Iterator:
    return (node for node in ast.walk(ast.parse((PACK / path).read_text())) if isinstance(node, kind))


def _text(value: ast.expr | None) -> Iterator[str]:
    """The texts that an expression can be, of those that are written in it."""
    if isinstance(value, ast.IfExp):
        yield from (*_text(value.body), *_text(value.orelse))
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
        yield value.value
    if isinstance(value, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "3" for part in value.values)
