"""Parallel DiT Loader: a file and degrees -> a native MODEL whose transformer is on several devices. Parallel Checkpoint
Loader: the same with CLIP and VAE of an all-in-one file, in ComfyUI."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_paths

from parallel_backend.checkpoints.tensor_files import GGUF, SAFETENSORS
from parallel_backend.core.degrees import DTYPES, WIDGETS, Degrees
from parallel_backend.core.devices import device_kind, names_ray
from parallel_backend.core.dtypes import resolve_dtype
from parallel_backend.core.setup import Setup
from parallel_backend.placement.balance import check_stage_split
from parallel_backend.placement.residency import offload_of
from parallel_backend.quickstart.model import WEIGHTS

from .model.loading.all_in_one import clip_and_vae
from .model.loading.model_file import ModelFile, importing, open_file
from .model.patcher import RemoteModelPatcher, make_model
from .parallel_config import ParallelConfig
from .sampling.auto_degrees import AS_SET, AUTO, DEGREES, check_no_stages, model_to_plan
from .sampling.pipefusion import apply_pipefusion
from .ui.attention import attention_for
from .ui.devices import check_devices, choose_devices, half_dtypes, possible_devices, why_hidden
from .ui.input_checks import coerce, defaults, renamed_input, short, validate
from .ui.node_text import say
from .ui.start_options import FP8_PRODUCTS, is_fast, options_line, wanted_halves
from .ui.widgets import CATEGORY, SEVERAL_GPUS, Widget, choice, degree, flag, link, offload, text

BUNDLED = "quickstart-digits (bundled)"
FOLDER = "diffusion_models"
CHECKPOINTS = "checkpoints"
IN_CHECKPOINTS = f"{CHECKPOINTS}/"
"""Prefix of the names of all-in-one files, from which this node loads only the transformer."""


def model_names() -> list[str]:
    """Return the names of the bundled model, of the safetensors and GGUF files in models/diffusion_models, and of all-in-one
    files. ComfyUI's own list has no GGUF files."""
    found = {
        name for base in folder_paths.get_folder_paths(FOLDER) for name in folder_paths.recursive_search(base, [".git"])[0]
    }
    files = sorted({*safetensors_names(FOLDER), *folder_paths.filter_files_extensions(found, GGUF)})
    return [BUNDLED, *files, *(IN_CHECKPOINTS + name for name in safetensors_names(CHECKPOINTS))]


def safetensors_names(folder: str) -> list[str]:
    """Return the names of the safetensors files in one of ComfyUI's model folders."""
    return [name for name in folder_paths.get_filename_list(folder) if name.lower().endswith(SAFETENSORS)]


def model_path(name: str) -> Path:
    """Return the path of an entry of `model_names`. Raises ValueError if the file is gone."""
    if name == BUNDLED:
        return Path(WEIGHTS)
    if (path := file_path(FOLDER, name)) is not None:
        return path
    if name.startswith(IN_CHECKPOINTS) and (path := file_path(CHECKPOINTS, name.removeprefix(IN_CHECKPOINTS))) is not None:
        return path
    raise ValueError(f"model_name: {short(name)} is not in models/{FOLDER}. Refresh the node list, or pick another file.")


def file_path(folder: str, name: str) -> Path | None:
    """Return the path of a file in one of ComfyUI's model folders, or None if there is no such file."""
    with contextlib.suppress(OSError, ValueError):  # raised for impossible names: too long, with a NUL, on another drive
        if (path := folder_paths.get_full_path(folder, name)) is not None:
            return Path(path)
    return None


def widgets(name: str, model_choice: Widget) -> dict[str, dict[str, Widget]]:
    """Return the inputs of a node that loads a model. Its input `name` chooses the model, with the entry `model_choice`."""
    return {
        "required": {
            name: model_choice,
            "weight_dtype": choice(
                list(DTYPES),
                "default",
                "default: the file's dtype on GPUs, fp32 on CPU ranks. fp8_e4m3fn and int8 take about half the memory "
                "of bf16. They multiply in 8 bits if the GPU can. A dtype that the GPU cannot compute in, such as bf16 "
                "before Ampere, becomes fp16 or fp32, as in ComfyUI.",
            ),
            "pipefusion_degree": degree(
                "Number of pipeline stages. Each GPU holds a share of the blocks. For models that do not fit on one GPU "
                "and for slow links. Use it with PipeFusion Sampler or Apply PipeFusion."
            ),
            "tensor_parallel_degree": degree(
                "Number of GPUs that split the weights of every block. Exact. Saves memory like pipefusion_degree, but "
                "needs fast links: results are added up twice in every block."
            ),
            "split_batch_degree": degree(
                "Number of model copies that split the batch. 2 runs the positive and the negative prompt (cfg above 1) "
                "at the same time. Exact."
            ),
            "devices": text(
                "auto",
                "auto (the first GPUs), or one device for each rank, such as cuda:0,cuda:1 or cpu,cpu. The number of "
                "devices is the product of all degrees. ray:cuda,cuda takes GPUs of a Ray cluster, on any of its "
                "machines.",
            ),
        },
        "optional": {
            "parallel_config": link(
                "PARALLEL_CONFIG", "From Ulysses Config, to split one image's tokens over GPUs. Optional."
            ),
            "stage_split": text(
                "auto",
                "Blocks per pipeline stage. auto measures each GPU and gives faster ones more blocks. even gives all "
                "the same. Numbers such as 30,27 set it by hand. With patch_mode displaced, auto gives faster GPUs "
                "larger patches.",
            ),
            "compile": flag(
                False,
                "Compiles the model's blocks with torch.compile. The first steps with a new model or image size take a "
                "minute or more. Later steps are faster.",
            ),
            "degrees": choice(
                list(DEGREES),
                AS_SET,
                "auto: ignores the degrees here and in Ulysses Config. It finds the fastest degrees at the first image, "
                "and keeps them until the model is unloaded. They give the exact image, or with PipeFusion maybe a close "
                "one. devices says which GPUs may be used.",
            ),
            "offload": offload(),
            "cuda_graphs": flag(
                False,
                "Experimental. Runs repeated steps as CUDA graphs, for small models and images whose kernels the CPU "
                "starts too slowly. Takes some more memory. Works with pipefusion_degree and split_batch_degree; other "
                "degrees ignore it.",
            ),
        },
    }


SETUP_WIDGETS = ("stage_split", "compile", "cuda_graphs")
"""Widgets with the same names and values as fields of Setup."""


def check_widgets(
    devices: str | None,
    pipefusion_degree: int | None = 1,
    tensor_parallel_degree: int | None = 1,
    split_batch_degree: int | None = 1,
    stage_split: str | None = "even",
    degrees: str | None = AS_SET,
    offload: str | None = "auto",
    parallel_config: object = ParallelConfig(),
) -> None:
    """Raise ValueError for values of `widgets` with which no model can be loaded. None: another node's output is
    connected."""
    if offload is not None:
        offload_of(offload)
    sizes: dict[str, Any] = {"batch": split_batch_degree, "pipe": pipefusion_degree, "tensor": tensor_parallel_degree}
    known = Degrees(**{axis: size for axis, size in sizes.items() if size is not None})
    if degrees is None or devices is None:
        check_devices(devices)
    elif degrees == AUTO:
        _to_plan(devices)
    else:
        choose_devices(devices, known, None not in (*sizes.values(), parallel_config))
    if stage_split is not None and degrees == AUTO:
        check_no_stages(stage_split)
    elif stage_split is not None and degrees is not None and pipefusion_degree is not None:
        check_stage_split(stage_split, pipefusion_degree, None)


@validate("model_name", early=check_widgets)
class ParallelDiTLoader:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*SEVERAL_GPUS, "load model", "model loader")
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    DESCRIPTION = (
        "Loads a diffusion transformer split over several GPUs. The MODEL works with KSampler and every other sampler. "
        "The rank processes start while other nodes run, and stay for the next prompts."
    )

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = (
            "A file in models/diffusion_models, or an all-in-one file in models/checkpoints. The model type is detected "
            "from the weights."
        )
        return widgets("model_name", (model_names(), {"default": BUNDLED, "tooltip": tooltip}))

    def load(self, model_name, **values):
        model = load_model(model_path(coerce("model_name", model_name, "STRING", {})), values)
        model.start_ranks()
        return (model,)


@validate("ckpt_name", early=check_widgets)
class ParallelCheckpointLoader:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*SEVERAL_GPUS, "load checkpoint", "checkpoint loader")
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"
    DESCRIPTION = (
        "Loads an all-in-one file. Its transformer is split over several GPUs, and only the rank processes read it. "
        "Text encoder and VAE load as in Load Checkpoint."
    )

    @classmethod
    def INPUT_TYPES(cls):
        tooltip = "An all-in-one safetensors file in models/checkpoints. The model type is detected from the weights."
        return widgets("ckpt_name", (safetensors_names(CHECKPOINTS), {"tooltip": tooltip}))

    def load(self, ckpt_name, **values):
        path = file_path(CHECKPOINTS, coerce("ckpt_name", ckpt_name, "STRING", {}))
        if path is None:
            raise ValueError(f"ckpt_name: {short(ckpt_name)} is not in models/{CHECKPOINTS}. Refresh the node list.")
        with renamed_input("model_name", "ckpt_name"):
            model = load_model(path, values)
        model.start_ranks()
        return (model, *clip_and_vae(path))


def load_model(path: Path, settings: Mapping[str, Any]) -> RemoteModelPatcher:
    """Return the MODEL of a file. `settings`: values of `widgets`; absent ones have the widget's default.

    Raises ValueError, beginning with the input's name, for a model or a value that cannot be loaded.
    """
    values = {"parallel_config": None, **defaults(widgets("", ("", {}))), **settings}
    config = ParallelConfig() if values["parallel_config"] is None else values["parallel_config"]
    planned = values["degrees"] == AUTO
    degrees, devices = _to_plan(values["devices"]) if planned else _as_set(values, config)
    return model_of(open_file(path, importing(devices[0])), degrees, devices, planned, values, config)


def model_of(
    file: ModelFile,
    degrees: Degrees,
    devices: tuple[str, ...],
    planned: bool,
    values: Mapping[str, Any],
    config: ParallelConfig,
) -> RemoteModelPatcher:
    """Return the MODEL of an opened file. `planned`: degrees are worked out at the first image. `values`: of all `widgets`.

    ValueError as `load_model`.
    """
    checkpoint = file.checkpoint
    if file.own.unet:
        _check_unet(checkpoint.path.name, degrees, planned, bool(values["compile"]))
    native = wanted_halves(half_dtypes(devices), file.own.halves, values["weight_dtype"])
    dtype = resolve_dtype(values["weight_dtype"], checkpoint.dtype, devices, file.own.halves, native)
    options = options_line(dtype, device_kind(devices[0]))
    if lines := [line for line in (file.left_over, options and f"Parallel DiT: {options}") if line]:
        say("\n".join(lines))
    attention = attention_for(config.attention, devices, dtype)
    setup = Setup(
        path=checkpoint.path,
        dtype=dtype,
        devices=devices,
        degrees=degrees,
        attention=attention,
        transfer_dtype=config.transfer_dtype,
        keep_run=config.keep_run,
        offload=offload_of(values["offload"]),
        own_class=file.own,
        fp8_products=is_fast(FP8_PRODUCTS),
        **{name: values[name] for name in SETUP_WIDGETS},
    )
    if planned:
        if len(set(devices)) == 1 and (hidden := why_hidden()):
            say(f"Parallel DiT: degrees auto has one device only.{hidden}")
        return model_to_plan(file, setup, config.comm_overlap)
    model = make_model(file, setup, config.comm_overlap)
    if degrees.displaced:
        # Displaced patches keep keys from step to step, within one sampler's run. PipeFusion Sampler replaces this wrapper.
        model, _ = apply_pipefusion(model, 1, config.patch_warmup_steps, config.comm_overlap, True)
    return model


def _check_unet(name: str, degrees: Degrees, planned: bool, compiled: bool) -> None:
    """Raise ValueError, which names the widget, for settings with which ranks cannot run a UNet."""
    runs = f"{name} runs only with split_batch_degree"
    if planned:
        raise ValueError(f"Set degrees to 'as set': {runs}, which auto cannot choose.")
    for axis, widget in WIDGETS.items():
        if axis != "batch" and getattr(degrees, axis) > 1:
            raise ValueError(f"Set {widget} to 1: {runs}.")
    if compiled:
        raise ValueError(f"Set compile to off: {runs}.")


def _to_plan(devices: str) -> tuple[Degrees, tuple[str, ...]]:
    """Return degrees of one rank, used until the planner has chosen, and the devices from which the planner may choose."""
    if names_ray(devices):
        raise ValueError(
            "Set degrees to 'as set': it is auto, but the machines of a Ray cluster are unknown before ranks run there. "
            "Parallel Doctor says which degrees are fastest there."
        )
    return Degrees(), possible_devices(devices)


def _as_set(values: Mapping[str, Any], config: ParallelConfig) -> tuple[Degrees, tuple[str, ...]]:
    """Return the degrees of the widgets and of Ulysses Config, and a device for each rank."""
    degrees = replace(
        config.degrees,
        batch=values["split_batch_degree"],
        pipe=values["pipefusion_degree"],
        tensor=values["tensor_parallel_degree"],
    )
    return degrees, choose_devices(values["devices"], degrees)
