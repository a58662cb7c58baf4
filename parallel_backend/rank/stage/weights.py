"""Fills a stage's model with the rank's own weights: cut, converted or kept packed."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import reading
from parallel_backend.core.dtypes import compute_dtype

from .linear import RankLinear
from .tensor_parallel import TensorPlan


def fill_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    targets: Iterable[str],
    plan: TensorPlan | None,
    device: torch.device,
    dtype_name: str,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Read parameters `targets` of `model`, on the meta device until now, to `device`.

    Parameters that `plan` cuts become this rank's shard, or None if it has no part. Linear layers become `RankLinear`s.
    Their weights stay packed as `Checkpoint.storage` says. Everything else is in the compute dtype, or in float32 if it is
    one of `Forward.float32`. `progress` gets the share of the bytes in place, before each parameter and at the end.
    ValueError if the file's shape is not the parameter's. Sides of 1 are ignored, since GGUF's tools may drop them.
    """
    RankLinear.adopt(model)
    dtype = compute_dtype(dtype_name, device)
    targets, known = list(targets), model.state_dict()
    for target in targets:
        shape = known[target].shape
        shape = [shape.numel()] if checkpoint.key_map[target].flat else shape
        if _without_ones(checkpoint.shape(target)) != _without_ones(shape):
            raise ValueError(
                f"model_name: {checkpoint.path.name} holds {checkpoint.key_map[target].key} of shape "
                f"{list(checkpoint.shape(target))}, where {checkpoint.family.name} has {list(known[target].shape)}."
            )
    shards = {} if plan is None else plan.shards({target: checkpoint.shape(target) for target in targets})
    sizes = {target: checkpoint.nbytes(target, dtype_name) for target in targets}
    done, total = 0, sum(sizes.values())
    with reading(checkpoint) as reader:
        for target in targets:
            progress(done / total)
            done += sizes[target]
            name, _, leaf = target.rpartition(".")
            module, shard = model.get_submodule(name), shards.get(target)
            if shard is not None and not shard.spans:
                setattr(module, leaf, None)
                continue
            linear = isinstance(module, RankLinear) and leaf == "weight"
            storage = checkpoint.storage(target, dtype_name) if linear else None
            if storage is None or not reader.packable(target, storage, shard):
                values = reader.values(target, checkpoint.compute_dtype(target, dtype), shard, device)
                values = values.view(known[target].shape) if shard is None else values
                setattr(module, leaf, nn.Parameter(values, requires_grad=False))
            else:
                module.pack(*reader.packed(target, storage, shard, device), dtype)
    progress(1.0)


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]
