"""Opens single files in the layout of ComfyUI's own class."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Conversion, Setup, TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.own_class.built.built_class import built_class

from .checkpoint import Checkpoint, checked
from .file_state import file_state
from .single_file import Contents, contents_of, refusals


def open_setup(setup: Setup) -> Checkpoint:
    """The checkpoint of a model that the client has opened. ValueError as `open_own_class`."""
    return open_own_class(setup.path, setup.own_class, setup.conversion, setup.enlarged)


def open_own_class(path: Path, own: OwnClass, conversion: Conversion = (), enlarged: TensorSizes = ()) -> Checkpoint:
    """The checkpoint of a file. ValueError as `contents_of` and `checkpoint_of`."""
    with refusals(path):
        return checkpoint_of(contents_of(path).converted(conversion), own, enlarged)


def checkpoint_of(contents: Contents, own: OwnClass, enlarged: TensorSizes = ()) -> Checkpoint:
    """The checkpoint of a file with these contents. What the class has no use for is left out, as ComfyUI leaves it out.

    ValueError, with a text for the user, if the class cannot be built, and if the file lacks one of its parameters or
    has one of another shape.
    `enlarged`: by key, sizes of tensors that a LoRA enlarges, with zeros behind the file's values.
    """
    try:
        built = built_class(own)
    except Exception as error:  # of any kind: its code is not known
        raise ValueError(
            f"model_name: {contents.name}: ComfyUI's class {own.name} cannot be built on ranks ({type(error).__name__}: "
            f"{error}). Load it with ComfyUI's own loader, on one GPU."
        ) from error
    # Tables that the class computes may be missing, or be there as a marker without values.
    entries = {key: entry for key, entry in contents.entries.items() if 0 not in entry.shape}
    key_map = {name: key for name, key in built.key_map.items() if name in built.parameters or key in entries}
    opened = Checkpoint(contents.path, built, key_map, entries, attention=contents.attention, conversion=contents.conversion)
    if enlarged:
        larger = entries | {key: replace(entries[key], shape=shape) for key, shape in enlarged}
        opened = replace(opened, entries=larger, smaller=opened)
    checkpoint = checked(opened)
    for target, key in key_map.items():
        found, needed = checkpoint.shape(target), built.shapes[target]
        if not _fits(found, needed):
            raise ValueError(
                f"model_name: {contents.name} has {short(key)} in the shape {short(list(found))}, but ComfyUI's class "
                f"{own.name} has {list(needed)}. The file is damaged, or for another version of the class."
            )
    return replace(checkpoint, file_state=file_state(entry.file for entry in checkpoint.entries.values()))


def with_class(checkpoint: Checkpoint, own: OwnClass) -> Checkpoint:
    """The checkpoint of a class of which something else is proven, such as layers that tensor ranks share."""
    call = checkpoint.built.call
    assert call is not None
    return replace(checkpoint, built=replace(built_class(own), call=call))


def _fits(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether values of the shape `stored` are a parameter's. Sizes of 1 are ignored, since GGUF's tools may drop them, but
    not of a matrix, which may stay packed in its rows."""
    return stored == shape if len(shape) == 2 else _without_ones(stored) == _without_ones(shape)


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]
