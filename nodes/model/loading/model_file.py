"""Opens a model's file by ComfyUI's rules: its detection, its conversions, and its own class as data for ranks."""

import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_detection
import comfy.utils
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint, checkpoint_of
from parallel_backend.checkpoints.single_file import NOT_RUN, UNET, Contents, check_own_arguments, contents_of, refusals
from parallel_backend.core.devices import device_kind
from parallel_backend.core.own_class import DTYPE, ROOT, Conversion, OwnClass
from parallel_backend.core.setup import TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.built.building import meta_parameters

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMED = 3
"""Maximum number of tensors that a line names."""
ARGUMENTS = "comfy.cli_args"


@dataclass(frozen=True)
class ModelFile:
    """An opened file."""

    checkpoint: Checkpoint
    own: OwnClass
    """ComfyUI's class of the model, which ranks run."""
    model: comfy.model_base.BaseModel
    """ComfyUI's BaseModel, without its diffusion_model."""

    @property
    def left_over(self) -> str:
        """A line that tells the user which tensors of the file are dropped. Empty if there are none."""
        names = list(map(short, self.checkpoint.unused))
        if not names:
            return ""
        shown = ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
        return (
            f"Parallel DiT: left out, as in ComfyUI, because no part of the model uses them: {len(names)} tensors ({shown})"
        )


def open_file(path: Path, imported: Mapping[str, Any], enlarged: TensorSizes = ()) -> ModelFile:
    """Open a single file for ranks. Its header is read, but no weights. `imported`: how ranks import ComfyUI, see
    `importing`.

    Raises ValueError, beginning with the input's name, for a file that ranks cannot run, such as audio, 3D and tool models.
    `enlarged`: sizes of tensors that a LoRA enlarges.
    """
    with refusals(path):
        return _model_file(contents_of(path), imported, enlarged)


def importing(device: str) -> dict[str, Any]:
    """`folder` and `settings` of an OwnClass for ranks on this kind of device. A rank imports ComfyUI once, for both models
    and VAEs."""
    cpu = device_kind(device) == "cpu"
    settings = (ARGUMENTS, "args.cpu", cpu), (ARGUMENTS, "args.use_pytorch_cross_attention", True)
    return {"folder": str(Path(comfy.model_base.__file__).resolve().parents[1]), "settings": settings}


def _detected(contents: Contents, enlarged: TensorSizes) -> tuple[Contents, dict[str, torch.Tensor], Any]:
    """Return (the contents, converted if ComfyUI converts such a file; their tensors; ComfyUI's config of the file)."""
    stored = contents
    try:
        tensors = contents.tensors(enlarged)
        config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=contents.metadata)
        if config is None and (conversion := conversion_of(contents.tensors())):
            contents = contents.converted(conversion)
            tensors = contents.tensors(enlarged)
            config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=contents.metadata)
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not
        raise stored.refusal() from None
    if config is None:
        raise stored.refusal()
    return contents, tensors, config


def conversion_of(tensors: Mapping[str, torch.Tensor]) -> Conversion:
    """Return how ComfyUI converts a file in diffusers' layout, as rows of its tensors. Empty: it does not convert the file.
    `tensors`: of a file that ComfyUI's detection does not know. They may be on the meta device."""
    rows = {key: tensor.shape[0] if tensor.ndim else 1 for key, tensor in tensors.items()}
    if converted := _of_transformer(rows):
        return converted
    config = comfy.model_detection.model_config_from_diffusers_unet(tensors)
    if config is None:
        return ()
    names = comfy.utils.unet_to_diffusers(config.unet_config)
    return tuple((name, ((key, 0, rows[key]),)) for key, name in names.items() if key in rows)


def _of_transformer(rows: Mapping[str, int]) -> Conversion:
    """Return how ComfyUI converts a transformer's tensors. To find it, ComfyUI's own function converts row numbers in place
    of weights. `rows`: number of rows of each tensor, by key."""
    numbered, starts, start = {}, {}, 0
    for key, count in rows.items():
        numbered[key] = torch.arange(start, start + count)
        starts[start] = key
        start += count + 1  # the gap parts the rows of two tensors
    rest = dict(numbered)
    converted = comfy.model_detection.convert_diffusers_mmdit(rest, "")
    if converted is None or sum(map(len, converted.values())) != sum(len(numbered[key]) for key in numbered.keys() - rest):
        return ()  # None, or some of a tensor's rows are missing
    return tuple((key, tuple(_runs(numbers, starts))) for key, numbers in converted.items())


def _runs(rows: torch.Tensor, starts: Mapping[int, str]) -> list[tuple[str, int, int]]:
    """Return row numbers as runs (tensor, first row, row after the last), in order."""
    ends = [*(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(rows)]
    known = torch.tensor(list(starts))
    runs = []
    for begin, end in zip([0, *ends], ends, strict=False):
        first = int(rows[begin])
        start = int(known[torch.searchsorted(known, first, right=True) - 1])
        runs.append((starts[start], first - start, first - start + end - begin))
    return runs


def _model_file(contents: Contents, imported: Mapping[str, Any], enlarged: TensorSizes) -> ModelFile:
    """Return the file with these contents, for the class by which ComfyUI would compute it. Errors: as `open_file`."""
    contents, tensors, config = _detected(contents, enlarged)
    name, stated, other = contents.name, contents.stated or {}, contents.other
    if other is not None and other.what not in (NOT_RUN, UNET):
        raise contents.refusal()
    if entry := next((each for each in adapter_of(type(config).__name__).stated if each not in stated), ""):
        raise ValueError(
            f"model_name: the header of {name} lacks its {entry}, which the model's own files have. Without it ComfyUI "
            "too would compute another model. Get the file from another source."
        )
    stated_arguments = {argument: value for argument, value in config.unet_config.items() if argument in stated}
    check_own_arguments(name, stated_arguments, [tuple(tensor.shape) for tensor in tensors.values()])
    try:
        config.set_inference_dtype(torch.float32, None)
        with meta_parameters():
            model = config.get_model(tensors | contents.sampling, "")
        native = type(model.diffusion_model)
        renamed = {key: config.process_unet_state_dict({key: tensor}) for key, tensor in tensors.items()}
        given = {name: value for name, value in config.unet_config.items() if name != "dtype"}
        arguments = json.dumps(given, default=_dtype_name)
        code = inspect.getsource(sys.modules[native.__module__])
    except Exception:  # of any kind: ComfyUI's code may ask for what a damaged file has not, or a single tensor
        raise contents.refusal() from None
    unet = issubclass(native, comfy.model_base.UNetModel)
    if (other is not None and (other.what == UNET) != unet) or not native.__module__.startswith(ROOT):
        raise contents.refusal()
    del model.diffusion_model
    named = {f"comfy.{name}" for name in re.findall(r"\bcomfy\.(\w+)", code)} - {ROOT.rstrip(".")}
    keys = {next(iter(names)): key for key, names in renamed.items() if len(names) == 1}
    own = OwnClass(
        kind=type(config).__name__,
        module=native.__module__,
        name=native.__qualname__,
        arguments=arguments,
        imports=tuple(sorted(named & sys.modules.keys())),
        keys=tuple((parameter, key) for parameter, key in keys.items() if parameter != key),
        halves=tuple(HALVES[dtype] for dtype in config.supported_inference_dtypes if dtype in HALVES),
        video=config.latent_format.latent_dimensions == 3,
        unet=unet,
        conversion=contents.conversion,
        **imported,
    )
    return ModelFile(checkpoint_of(contents, own, enlarged), own, model)


def _dtype_name(value: Any) -> str:
    """Return a dtype among a class's arguments as text, because JSON has no dtypes. Raises TypeError for any other value."""
    if isinstance(value, torch.dtype):
        return f"{DTYPE}{str(value).removeprefix('torch.')}"
    raise TypeError(type(value))
