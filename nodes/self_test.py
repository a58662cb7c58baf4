"""Parallel Self-Test: checks this machine in about five minutes, for a bug report or before the first use."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch

from parallel_backend.acceptance.checks import run
from parallel_backend.acceptance.report import describe, document_of, dumps, verdict
from parallel_backend.acceptance.session import Host, NotLookedAt, OwnModel, Settings, at_least_two
from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.registry import registry
from parallel_backend.client.sampling import Predict
from parallel_backend.own_class.calls.call_arguments import OPTIONS, from_tensors, structure_of

from .model.call.diffusion_model import remote_stub
from .model.call.own_calls import times_of
from .model.patcher import RemoteModelPatcher
from .ui.devices import check_one_kind_of_devices, is_auto, possible_devices
from .ui.host import check_cancelled
from .ui.input_checks import validate
from .ui.node_text import say, show_report
from .ui.widgets import CATEGORY, link, text

FILE_NAME = "parallel_dit_self_test"
READABLE = (".safetensors", ".sft")
"""Files that ComfyUI's own loader reads."""


def comfyui() -> Host:
    """Return this ComfyUI: its version, its start options, and its function to run a checkpoint."""
    from comfyui_version import __version__

    return Host(f"ComfyUI {__version__}", tuple(sys.argv[1:]), native_model, registry().folder)


@validate(early=check_one_kind_of_devices)
class ParallelSelfTest:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "test gpus", "gpu check")
    RETURN_TYPES = ("STRING", "STRING")
    RETURN_NAMES = ("report", "json")
    FUNCTION = "look"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Checks what can go wrong on this machine: driver, kernels, links between GPUs, every mode against one GPU. "
        "Takes minutes. Saves a JSON for a bug report."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "devices": text(
                    "auto",
                    "auto (all GPUs; with one GPU, two ranks on it; without a GPU, two CPU ranks), or a list such as "
                    "cuda:0,cuda:1.",
                )
            },
            "optional": {
                "model": link(
                    "MODEL",
                    "From Parallel DiT Loader or Parallelize Model. The test runs the model's file in ComfyUI itself, "
                    "on one GPU and on all. Its degrees and dtype are ignored.",
                )
            },
        }

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")  # equal to nothing: ComfyUI runs the node at every prompt

    def look(self, devices, model=None):
        own = None if model is None else own_model(model)
        chosen = possible_devices(devices)
        settings = Settings(at_least_two(chosen) if is_auto(devices) else chosen, own)
        comfy.model_management.unload_all_models()
        registry().close()  # running ranks would share the GPUs with the ranks that the self-test starts
        comfy.model_management.soft_empty_cache()
        bar, started = comfy.utils.ProgressBar(1), time.perf_counter()

        def progress(done: int, total: int, name: str) -> None:
            bar.update_absolute(done, total)
            if name:
                say(f"Parallel DiT: {name}, {done} of {total} checks")

        results = run(settings, comfyui(), check_cancelled, progress)
        document = document_of(settings, results, time.perf_counter() - started)
        report = f"{describe(document)}\n{save(dumps(document))}"
        return {"ui": show_report(report, verdict(document)), "result": (report, json.dumps(document))}


def own_model(model: RemoteModelPatcher) -> OwnModel:
    """Return the class, the last call and the timesteps of a MODEL. Raises ValueError if it has not been called yet."""
    stub = remote_stub(model)
    if (call := stub.checkpoint.built.call) is None:
        raise ValueError(
            f"model: {stub.checkpoint.path.name} has not been called yet, and its test repeats the last call. Sample with "
            "it once before, or leave this input empty."
        )
    sampling = model.get_model_object("model_sampling")
    return OwnModel(stub.checkpoint.path, replace(stub.own, blocks=(), latent=None), call, times_of(sampling))


@contextlib.contextmanager
def native_model(checkpoint: Checkpoint) -> Iterator[Predict]:
    """Context with ComfyUI's own model of this file, on the device and in the dtype that ComfyUI chooses. Raises NotLookedAt
    for a file that ComfyUI's loader does not read, or a model that needs more than the given tensors."""
    if checkpoint.path.suffix not in READABLE:
        raise NotLookedAt("ComfyUI's own loader reads single safetensors files alone")
    try:
        patcher = comfy.sd.load_diffusion_model(str(checkpoint.path))
    except RuntimeError as error:
        raise NotLookedAt(f"ComfyUI cannot load the file ({str(error).partition(chr(10))[0]})") from error
    comfy.model_management.load_models_gpu([patcher])
    device, dtype = patcher.load_device, patcher.model.manual_cast_dtype or patcher.model.get_dtype()

    @torch.inference_mode()
    def predict(x: torch.Tensor, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {name: tensor.to(device) for name, tensor in tensors.items()}
        conditioning = {OPTIONS: {}} | from_tensors(given, structure_of(tensors))  # as ComfyUI has given them to it
        try:
            output = patcher.model.diffusion_model(x.to(device, dtype), timestep.to(device).float(), **conditioning)
        except (TypeError, RuntimeError) as error:  # the model needs other arguments, or memory is short
            raise NotLookedAt(f"ComfyUI's model cannot be called in this way ({error})") from error
        return output.float().cpu()

    try:
        yield predict
    finally:
        comfy.model_management.unload_all_models()  # the ranks need this memory next
        comfy.model_management.soft_empty_cache()


def save(document: str) -> str:
    """Write the JSON to ComfyUI's output folder. Returns a line of the report: the path, or why it was not saved."""
    folder, name, number, *_ = folder_paths.get_save_image_path(FILE_NAME, folder_paths.get_output_directory())
    path = Path(folder) / f"{name}_{number:05}_.json"
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        return f"JSON: not saved ({error.strerror}). The node's output json has it."
    return f"JSON: {path}"
