"""How checkpoints of a family are recognised and read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel_backend.core.spans import Span

from .step_inputs import Config, Shapes


@dataclass(frozen=True)
class Source:
    """Where the values of a parameter are in a checkpoint."""

    key: str
    """Name of the checkpoint's tensor."""

    rows: Span | None = None
    """Rows of that tensor. None: all."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the values, of a tensor of the shape `whole`."""
        return whole if self.rows is None else (len(self.rows), *whole[1:])


@dataclass(frozen=True)
class HeaderConfig:
    """What the header of a single file may say about a model beyond its tensors.

    ComfyUI passes the JSON object `config`, `transformer` of a safetensors header to its class, and tells some models apart
    by it alone. A file whose header asks for something that this family does not compute is refused.
    """

    values: Mapping[str, Callable[[Config], tuple[Any, ...]]]
    """Entry -> the values that this family computes with, lists as tuples. All that ComfyUI's class reads."""

    others: bool
    """Whether other entries are allowed, since ComfyUI's class ignores them. If not, they are refused."""

    takes: Callable[[Mapping[str, Any]], bool] = lambda _header: True
    """Whether a file with this header is of the family, where several families have the same keys."""


def header_arguments(*names: str) -> dict[str, Callable[[Config], tuple[Any, ...]]]:
    """`HeaderConfig.values` for entries that have the name and the value of an argument of the class's constructor."""

    def argument(name: str) -> Callable[[Config], tuple[Any, ...]]:
        return lambda config: (config[name],)

    return {name: argument(name) for name in names}


@dataclass(frozen=True)
class FileLayout:
    """How checkpoints of the family are recognised and read. Used by checkpoints/.

    Files have the original key layout, that of ComfyUI's model class. Methods give the usual
    answer: a family with another answer overrides the method in a subclass in its file. So do Sizes, Inputs, Forward and
    BlockList.
    """

    detect: Callable[[Shapes], bool]
    """Whether a single file with these keys and shapes is of this family. True for one family at most."""

    configure: Callable[[Shapes], Config]
    """Keys and shapes of a single file -> arguments of the class's constructor. ValueError for a model that cannot run."""

    key_map: Callable[[Config], dict[str, Source]]
    """Constructor arguments -> source in the original key layout of every parameter of the class. ValueError for a
    configuration that cannot run."""

    ignored: tuple[str, ...] = ()
    """Keys (regular expressions) that a file may have although the class does not use them. Others are refused."""

    header: HeaderConfig | None = None
    """Expected header of a single file. None: ComfyUI does not read headers of these models."""

    def takes_header(self, header: Mapping[str, Any]) -> bool:
        """Whether a single file with this header is of the family."""
        return self.header is None or self.header.takes(header)

    def computed(self, config: Config) -> Mapping[str, tuple[int, ...]]:
        """Tensors of the original layout that the class computes -> their shapes. A file may lack them, but ComfyUI's
        detection looks at them."""
        return {}
