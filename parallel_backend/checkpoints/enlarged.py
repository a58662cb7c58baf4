"""Checkpoints of which a LoRA enlarges tensors: with zeros behind their values, as a model of that size would have them."""

from dataclasses import replace

from parallel_backend.core.setup import TensorSizes
from parallel_backend.core.short_text import short

from .checkpoint import Checkpoint, checked, configured, refusals
from .class_check import check_class


def enlarge(checkpoint: Checkpoint, sizes: TensorSizes) -> Checkpoint:
    """The checkpoint with tensors of these sizes, by key. ValueError if the family has no model with such tensors."""
    if not sizes:
        return checkpoint
    shapes = dict(sizes)
    entries = {key: replace(entry, shape=shapes.get(key, entry.shape)) for key, entry in checkpoint.entries.items()}
    try:
        if shapes.keys() - entries.keys():
            raise ValueError(f"model_name: {checkpoint.path.name} does not hold {short(list(shapes))}.")
        with refusals(checkpoint.path):
            config = configured(checkpoint.path, checkpoint.family, entries, dict(checkpoint.stated))
            key_map = checkpoint.family.file.key_map(config)
            larger = checked(replace(checkpoint, entries=entries, config=config, key_map=key_map, smaller=checkpoint))
            check_class(short(checkpoint.path.name), checkpoint.family, config, key_map, entries)
    except ValueError:
        named = ", ".join(f"{short(key)} to {list(shape)}" for key, shape in sizes)
        raise ValueError(
            f"model: a LoRA that enlarges {named} cannot run on ranks, which have no {checkpoint.family.name} model of that "
            "size. Load the model with ComfyUI's own loader for it, or use a model that was made for this control."
        ) from None
    return larger
