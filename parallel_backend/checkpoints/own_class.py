"""Opens files of models that no family knows, in the layout of ComfyUI's own class."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Conversion, Setup, TensorSizes
from parallel_backend.core.short_text import short
from parallel_backend.families.own_class.example import with_example
from parallel_backend.families.own_class.family import OwnClassFamily, own_class_family

from .checkpoint import Checkpoint, checked, open_checked, refusals
from .class_check import fits
from .enlarged import enlarge
from .file_state import file_state
from .single_file import entries_of


def open_setup(setup: Setup) -> Checkpoint:
    """The checkpoint of a model that the client has opened, as `open_checked`."""
    if setup.own_class is None:
        return enlarge(open_checked(setup.path, setup.conversion), setup.enlarged)
    return open_own_class(setup.path, setup.own_class, setup.conversion, setup.enlarged)


def file_shapes(path: Path, conversion: Conversion = ()) -> tuple[dict[str, tuple[int, ...]], dict[str, Any] | None]:
    """Key of a single file, without prefix -> shape; the stated configuration. ValueErrors as `entries_of`, which see."""
    with refusals(path):
        entries, stated, _ = entries_of(path, conversion)
        return {key: entry.shape for key, entry in entries.items()}, stated


def with_class(checkpoint: Checkpoint, own: OwnClass) -> Checkpoint:
    """The checkpoint of an own class of which something else is proven, such as layers that tensor ranks share."""
    family = checkpoint.family
    assert isinstance(family, OwnClassFamily)
    assert family.call is not None
    return replace(checkpoint, family=replace(with_example(own_class_family(own), family.call), file=family.file))


def open_own_class(path: Path, own: OwnClass, conversion: Conversion = (), enlarged: TensorSizes = ()) -> Checkpoint:
    """A single file in the layout of ComfyUI's own class. ValueError as `open_checkpoint`, and if the file lacks a parameter
    of the class, or has one of another shape. What the class has no use for is left out, as ComfyUI leaves it out.

    `enlarged`: by key, sizes of tensors that a LoRA enlarges, with zeros behind the file's values."""
    with refusals(path):
        family = own_class_family(own)
        entries, stated, attention = entries_of(path, conversion)
        # Tables that the class computes may be missing, or be there as a marker without values.
        key_map = {
            name: source
            for name, source in family.file.key_map({}).items()
            if name in family.parameters or (source.key in entries and 0 not in entries[source.key].shape)
        }
        entries = {key: entry for key, entry in entries.items() if 0 not in entry.shape}
        family = replace(family, file=replace(family.file, key_map=lambda _config: key_map))
        opened = Checkpoint(path, family, {}, key_map, entries, stated or {}, attention=attention, conversion=conversion)
        if enlarged:
            entries = entries | {key: replace(entries[key], shape=shape) for key, shape in enlarged}
            opened = replace(opened, entries=entries, smaller=opened)
        checkpoint = checked(opened, sized=False)
        for target, source in key_map.items():
            found, needed = checkpoint.shape(target), family.shapes[target]
            if not fits(found, needed, whole=len(needed) == 2):  # a matrix may stay packed in its rows
                raise ValueError(
                    f"model_name: {short(path.name)} has {short(source.key)} in the shape {short(list(found))}, but "
                    f"ComfyUI's class {own.name} has {list(needed)}. The file is damaged, or for another version of the "
                    "class."
                )
        return replace(checkpoint, file_state=file_state(entry.file for entry in checkpoint.entries.values()))
