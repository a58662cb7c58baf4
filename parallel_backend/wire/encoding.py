"""Encodes messages as bytes: one JSON header, then the raw bytes of the message's tensors. Nothing is ever unpickled.

The dataclasses' annotations define the values that each field may have. The sender checks values before it sends anything,
the receiver before it uses anything. A header is a list of the type's name, the request id and the model's number (0: none),
and the fields in order: `["CloseRun", 17, 2, 4]`. A tensor is `[dtype, shape]`, or, in shared memory, `[dtype, shape,
segment, offset]` without following bytes (shared_memory.py). A tuple or nested message is a list, a dict a list of pairs.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch

from .shared_memory import Segment

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 1 << 12
"""Maximum number of tensors of a message. A VAE's decoder has several hundred."""
MAX_TENSOR_BYTES = 1 << 33
"""Maximum number of bytes of all tensors of a message together."""
MAX_AXES = 8
MAX_INT = 1 << 128
"""Integers must be at least 0 and below this. Some are random numbers of 128 bits."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BadMessage(ValueError):
    """The bytes are not a valid message, or this sender must not send this message."""


class Envelope(NamedTuple):
    """A message, the request that it belongs to, and the model that it is about."""

    message: Any
    request_id: int | None = None
    """Id of the request that the message makes or answers. None: it does neither."""
    model: int | None = None
    """Number of the model that the message is for or comes from. None: it is not about a model."""


class Pending(NamedTuple):
    """A tensor whose bytes follow the header. It is empty until they arrive, and is then resized to `shape`."""

    tensor: torch.Tensor
    shape: list[int]
    nbytes: int


class _Leaving(list[torch.Tensor]):
    """Tensors whose bytes follow the header of an outgoing message. `lent`: segments that the other end has open."""

    def __init__(self, lent: Iterable[Segment] = ()):
        self.lent = tuple(lent)


class _Arriving(list[Pending]):
    """Tensors whose bytes follow the header of an incoming message, in order. `borrowed`: open segments by number."""

    nbytes = 0

    def __init__(self, borrowed: Mapping[int, Segment] | None = None):
        self.borrowed = borrowed or {}

    def add(self, value: Any) -> torch.Tensor:
        place = None
        if type(value) is list and len(value) == 4:
            *value, number, offset = value
            place = _INT.read(number, self), _INT.read(offset, self)
        dtype, shape = _fixed(value, 2)
        if type(dtype) is not str or dtype not in DTYPES:
            raise BadMessage(f"a tensor of the dtype {_short(dtype)}")
        if type(shape) is not list or len(shape) > MAX_AXES or not all(map(_is_size, shape)):
            raise BadMessage(f"a tensor of the shape {_short(shape)}")
        if place is not None:
            return self._borrow(DTYPES[dtype], shape, *place)
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        self.nbytes += nbytes
        # Axes of length 0 count as 1: such a tensor has no bytes, but strides that torch must be able to hold.
        if max(self.nbytes, math.prod(filter(None, shape))) > MAX_TENSOR_BYTES or len(self) == MAX_TENSORS:
            raise BadMessage(f"more than {MAX_TENSORS} tensors or {MAX_TENSOR_BYTES} bytes")
        tensor = torch.empty(0, dtype=DTYPES[dtype])
        self.append(Pending(tensor if nbytes else tensor.resize_(shape), shape, nbytes))
        return tensor

    def _borrow(self, dtype: torch.dtype, shape: list[int], number: int, offset: int) -> torch.Tensor:
        if number not in self.borrowed:
            raise BadMessage(f"a tensor in segment {number} of shared memory, which is not open")
        try:
            return self.borrowed[number].tensor(dtype, shape, offset)
        except (ValueError, RuntimeError) as error:  # RuntimeError: an axis of length 0 and others too long for torch
            raise BadMessage(f"a tensor outside of its segment of shared memory: {error}") from error


class _Kind(NamedTuple):
    """How a type of field is encoded. `pack` converts (value, tensors) to a JSON value; `read` converts it back."""

    pack: Callable[[Any, _Leaving], Any]
    read: Callable[[Any, _Arriving], Any]


class Encoding:
    """Encodes and decodes messages of `types`, which are dataclasses. Headers that name another type are rejected."""

    def __init__(self, types: Iterable[type]):
        self._kinds: dict[Any, _Kind] = {}
        self._types = {cls.__name__: (cls, self._kind(cls)) for cls in types}
        self._pack = {cls: kind.pack for cls, kind in self._types.values()}

    def encode(
        self, message: Any, request_id: int | None = None, lent: Iterable[Segment] = (), model: int | None = None
    ) -> tuple[bytes, list[torch.Tensor]]:
        """Return the header, and the tensors (CPU, contiguous) that follow it. Raises AssertionError for values without an
        encoding.

        `request_id`, `model`: at least 1, see Envelope. Tensors in a segment of `lent` do not follow the header.
        """
        tensors = _Leaving(lent)
        pack = self._pack.get(type(message))
        assert pack is not None, f"{type(message)} cannot cross processes"
        fields = [type(message).__name__, request_id or 0, model or 0, *pack(message, tensors)]
        header = json.dumps(fields, separators=(",", ":")).encode()
        assert len(header) <= MAX_HEADER_BYTES and len(tensors) <= MAX_TENSORS, f"{type(message).__name__} is too large"
        return header, tensors

    def decode(self, header: bytes, borrowed: Mapping[int, Segment] | None = None) -> tuple[Envelope, list[Pending]]:
        """Return the message, and those of its tensors whose bytes follow. Raises BadMessage for an invalid header.
        `borrowed`: segments of shared memory that may contain tensors, by number."""
        arriving = _Arriving(borrowed)
        try:
            value = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"{type(error).__name__}: {error}") from error
        if type(value) is not list or len(value) < 3 or type(value[0]) is not str or value[0] not in self._types:
            raise BadMessage(f"a header of an unknown type: {_short(value)}")
        name, request_id, model, *fields = value
        try:
            numbers = _INT.read(request_id, arriving) or None, _INT.read(model, arriving) or None
            return Envelope(self._types[name][1].read(fields, arriving), *numbers), arriving
        except BadMessage as error:
            raise BadMessage(f"{name}: {error}") from error

    def _kind(self, hint: Any) -> _Kind:
        if hint not in self._kinds:
            self._kinds[hint] = self._make(hint)
        return self._kinds[hint]

    def _make(self, hint: Any) -> _Kind:
        if hint in _PLAIN:
            return _PLAIN[hint]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._record(hint)
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
            return _optional(self._kind(next(each for each in arguments if each is not NoneType)))
        if origin is tuple and arguments[1:] == (...,):
            return _sequence(self._kind(arguments[0]))
        if origin is tuple:
            return _tuple([self._kind(each) for each in arguments])
        if origin in (dict, Mapping):
            return _dict(*(self._kind(each) for each in arguments))
        raise TypeError(f"{hint} cannot be the type of a message's field")

    def _record(self, cls: type) -> _Kind:
        hints = get_type_hints(cls)
        kinds = {field.name: self._kind(hints[field.name]) for field in dataclasses.fields(cls)}
        packs = [(name, kind.pack) for name, kind in kinds.items()]
        reads = [(name, kind.read) for name, kind in kinds.items()]

        def pack(value: Any, tensors: _Leaving) -> list[Any]:
            assert type(value) is cls, _unfit(value)
            return [each(getattr(value, name), tensors) for name, each in packs]

        def read(value: Any, arriving: _Arriving) -> Any:
            if type(value) is not list or len(value) != len(reads):
                raise BadMessage(f"{_short(value)} instead of the {len(reads)} fields of {cls.__name__}")
            items = {name: each(item, arriving) for (name, each), item in zip(reads, value, strict=True)}
            try:
                return cls(**items)
            except ValueError as error:  # from the checks of a dataclass such as Degrees
                raise BadMessage(f"{cls.__name__}: {error}") from error

        return _Kind(pack, read)


def _optional(kind: _Kind) -> _Kind:
    pack, read = kind
    return _Kind(
        lambda value, tensors: None if value is None else pack(value, tensors),
        lambda value, arriving: None if value is None else read(value, arriving),
    )


def _sequence(kind: _Kind) -> _Kind:
    def pack(value: Any, tensors: _Leaving) -> list[Any]:
        assert isinstance(value, (tuple, list)), _unfit(value)
        return [kind.pack(item, tensors) for item in value]

    def read(value: Any, arriving: _Arriving) -> tuple:
        if type(value) is not list:
            raise BadMessage(f"{_short(value)} is no list")
        return tuple([kind.read(item, arriving) for item in value])

    return _Kind(pack, read)


def _tuple(kinds: list[_Kind]) -> _Kind:
    def pack(value: Any, tensors: _Leaving) -> list[Any]:
        assert isinstance(value, (tuple, list)) and len(value) == len(kinds), _unfit(value)
        return [kind.pack(item, tensors) for kind, item in zip(kinds, value, strict=True)]

    def read(value: Any, arriving: _Arriving) -> tuple:
        return tuple([kind.read(item, arriving) for kind, item in zip(kinds, _fixed(value, len(kinds)), strict=True)])

    return _Kind(pack, read)


def _dict(keys: _Kind, values: _Kind) -> _Kind:
    def pack(value: Any, tensors: _Leaving) -> list[list[Any]]:
        assert isinstance(value, dict), _unfit(value)
        return [[keys.pack(key, tensors), values.pack(item, tensors)] for key, item in value.items()]

    def read(value: Any, arriving: _Arriving) -> dict:
        if type(value) is not list:
            raise BadMessage(f"{_short(value)} is not a list of pairs")
        pairs = [_fixed(pair, 2) for pair in value]
        items = {keys.read(key, arriving): values.read(item, arriving) for key, item in pairs}
        if len(items) != len(pairs):
            raise BadMessage("a key comes twice")
        return items

    return _Kind(pack, read)


def _fixed(value: Any, length: int) -> list[Any]:
    if type(value) is not list or len(value) != length:
        raise BadMessage(f"{_short(value)} instead of {length} values")
    return value


def _plain(name: str, fits: Callable[[Any], bool]) -> _Kind:
    """The kind of values that JSON has too. `fits`: whether a value is one. `name`: for errors."""

    def pack(value: Any, _tensors: _Leaving) -> Any:
        assert fits(value), _unfit(value)
        return value

    def read(value: Any, _arriving: _Arriving) -> Any:
        if not fits(value):
            raise BadMessage(f"{_short(value)} is no {name}")
        return value

    return _Kind(pack, read)


def _is_size(value: Any) -> bool:
    """Whether the value can be the length of a tensor's axis."""
    return type(value) is int and 0 <= value <= MAX_TENSOR_BYTES


_INT = _plain("integer of at least 0", lambda value: type(value) is int and 0 <= value < MAX_INT)


def _pack_float(value: Any, _tensors: _Leaving) -> float:
    assert isinstance(value, (float, int)) and type(value) is not bool and math.isfinite(value), _unfit(value)
    return float(value)


def _read_float(value: Any, _arriving: _Arriving) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    raise BadMessage(f"{_short(value)} is no number")


def _pack_tensor(value: Any, tensors: _Leaving) -> list[Any]:
    assert isinstance(value, torch.Tensor) and value.dtype in _NAMES, _unfit(value)
    for segment in tensors.lent:
        if (offset := segment.offset_of(value)) is not None:
            return [_NAMES[value.dtype], list(value.shape), segment.number, offset]
    tensors.append(value.detach().to("cpu").contiguous())
    return [_NAMES[value.dtype], list(value.shape)]


def _pack_path(value: Any, _tensors: _Leaving) -> str:
    assert isinstance(value, Path), _unfit(value)
    return str(value)


def _read_path(value: Any, _arriving: _Arriving) -> Path:
    if type(value) is not str:
        raise BadMessage(f"{_short(value)} is no path")
    return Path(value)


_PLAIN = {
    int: _INT,
    float: _Kind(_pack_float, _read_float),
    bool: _plain("bool", lambda value: type(value) is bool),
    str: _plain("str", lambda value: type(value) is str),
    Path: _Kind(_pack_path, _read_path),
    torch.Tensor: _Kind(_pack_tensor, lambda value, arriving: arriving.add(value)),
}


def _unfit(value: Any) -> str:
    what = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"{type(value)} {_short(value)}"
    return f"{what} cannot cross processes"


def _short(value: Any) -> str:
    """Return the value as text for an error, cut to 80 characters."""
    text = repr(value) if isinstance(value, (str, int, float, bool, NoneType)) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."
