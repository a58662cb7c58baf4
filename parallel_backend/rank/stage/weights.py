"""A stage's weights: names and shapes, and how they are read from the file, cut, converted or packed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import Reader, reading
from parallel_backend.core.dtypes import compute_dtype

from .linear import PackedLinear, RankLinear
from .tensor_parallel import TensorPlan

Progress = Callable[[float], None]
"""Called with the fraction of the rank's weights (by bytes) that has been read, before each parameter and at the end."""

VALUES, PACKED = "values", "packed"
"""Name of the only tensor of a parameter that is not packed, and of a packed weight's bytes."""


class StageWeights:
    """The parameters of `model` that this rank has."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        targets: Iterable[str],
        plan: TensorPlan,
        device: torch.device,
        dtype_name: str,
    ):
        """Give the parameters `targets` of `model` the rank's shapes and dtypes. They stay on the meta device.

        A parameter that `plan` cuts becomes this rank's shard, or None if the rank has no part of it. Linear layers become
        `RankLinear`s, whose weights stay packed as `Checkpoint.storage` says. All others get the dtype in which `device`
        computes, or float32 if the class keeps it.
        """
        RankLinear.adopt(model)
        self.model, self.device, self.targets = model, device, list(targets)
        self._checkpoint, self._dtype_name = checkpoint, dtype_name
        self._reader: Reader | None = None  # while the model is loaded
        dtype, known = compute_dtype(dtype_name, device), model.state_dict()
        self._shards = {target: plan.shard(target, checkpoint.shape(target)) for target in self.targets}
        with reading(checkpoint) as reader:
            for target in self.targets:
                self._outline(target, known[target].shape, dtype, reader)

    @contextmanager
    def loading(self, progress: Progress) -> Iterator[None]:
        """Context in which all weights are read. The files stay open within it."""
        self._sizes = {target: self._checkpoint.nbytes(target, self._dtype_name) for target in self.targets}
        self._done, self._progress = 0, progress
        with reading(self._checkpoint) as self._reader:
            yield
        self._reader = None
        progress(1.0)

    def read(self, places: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Read parameters into `places`: VALUES of a parameter that is not packed, or PACKED and Packing.tensors of a packed
        one.

        The tensors in `places` have the shapes and dtypes of the model's, on any device. A parameter that is None has none.
        """
        with reading(self._checkpoint) if self._reader is None else nullcontext(self._reader) as reader:
            for target, tensors in places.items():
                if self._reader is not None:
                    self._progress(self._done / sum(self._sizes.values()))
                    self._done += self._sizes[target]
                self._read(target, tensors, reader)

    def _outline(self, target: str, whole: torch.Size, dtype: torch.dtype, reader: Reader) -> None:
        (module, leaf), shard, meta = self.place(target), self._shards[target], torch.device("meta")
        if shard is not None and not shard.spans:
            setattr(module, leaf, None)
            return
        if isinstance(module, RankLinear) and leaf == "weight":
            storage = self._checkpoint.storage(target, self._dtype_name)
            if storage is not None and reader.packable(target, storage, shard):
                module.pack(*reader.packed(target, storage, shard, meta), dtype)
                return
        values = reader.values(target, self._checkpoint.compute_dtype(target, dtype), shard, meta)
        setattr(module, leaf, nn.Parameter(values.view(whole) if shard is None else values, requires_grad=False))

    def _read(self, target: str, places: Mapping[str, torch.Tensor], reader: Reader) -> None:
        shard = self._shards[target]
        if VALUES in places:
            reader.read_values(target, shard, places[VALUES])
        elif PACKED in places:
            storage, packed = self._checkpoint.storage(target, self._dtype_name), places[PACKED]
            assert storage is not None
            _, packing = reader.packed(target, storage, shard, packed.device, packed)
            for name, tensor in packing.tensors.items():
                places[name].copy_(tensor)

    def place(self, target: str) -> tuple[nn.Module, str]:
        """Return (module of the parameter, its name in the module)."""
        name, _, leaf = target.rpartition(".")
        return self.model.get_submodule(name), leaf

    def tensors(self, target: str) -> dict[str, torch.Tensor]:
        """Return the parameter's present tensors, by the same names as in `read`."""
        module, leaf = self.place(target)
        if isinstance(module, PackedLinear) and leaf == "weight":
            return {PACKED: module.packed, **module.packing.tensors}
        parameter = getattr(module, leaf)
        return {} if parameter is None else {VALUES: parameter}

    def move(self, target: str, places: Mapping[str, torch.Tensor]) -> None:
        """Make the parameter `target` of the model a view of the tensors in `places` (see `read`). Their present contents do
        not matter."""
        module, leaf = self.place(target)
        if isinstance(module, PackedLinear) and PACKED in places:
            module.move(places[PACKED], {name: tensor for name, tensor in places.items() if name != PACKED})
        elif VALUES in places:
            parameter = getattr(module, leaf)
            if parameter.is_meta:
                setattr(module, leaf, nn.Parameter(places[VALUES], requires_grad=False))
            else:
                parameter.data = places[VALUES]
