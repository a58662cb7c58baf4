"""Checks of a node's inputs against their types and limits: ComfyUI checks widgets, but not values from other nodes."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch


class ComfyNode(Protocol):
    """A node's class in ComfyUI's form."""

    FUNCTION: str

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]: ...


Node = TypeVar("Node", bound=type[ComfyNode])

EARLY_CHECK = "VALIDATE_INPUTS"
"""The name of a node's method by which ComfyUI checks the node's widgets."""
SHOWN = 60
"""Maximum number of characters of a value that an error quotes."""


def validate(*checked_by_node: str, early: Callable[..., object] | None = None) -> Callable[[Node], Node]:
    """Class decorator: the node's function only gets values of its inputs' types and within their limits.

    Raises ValueError, beginning with the input's name, for other values. `checked_by_node`: inputs that the node itself
    checks. `early`: called with the widgets that its parameters name, before anything of a prompt runs. Its ValueError
    refuses the prompt. A widget that another node's output is connected to is None.
    """

    def adopt(node: Node) -> Node:
        function = getattr(node, node.FUNCTION)
        signature = inspect.signature(function)
        optional = {name for name, each in signature.parameters.items() if each.default is None}

        @functools.cache
        def inputs() -> dict[str, tuple]:
            return {name: spec for name, spec in _specs(node.INPUT_TYPES()).items() if name not in checked_by_node}

        @functools.wraps(function)
        def call(*arguments, **named):
            bound = signature.bind(*arguments, **named)
            values = dict(zip(list(signature.parameters)[1:], bound.args[1:], strict=False)) | bound.kwargs
            for name, (kind, options) in inputs().items():
                if name in values and not (values[name] is None and name in optional):
                    values[name] = coerce(name, values[name], kind, options)
            return function(bound.args[0], **values)

        setattr(node, node.FUNCTION, call)
        if early is not None:
            setattr(node, EARLY_CHECK, staticmethod(_host_check(early, inputs)))
        return node

    return adopt


def _host_check(early: Callable[..., object], inputs: Callable[[], dict[str, tuple]]) -> Callable[..., bool | str]:
    """Return the node's VALIDATE_INPUTS for ComfyUI. It returns True or an error text; ComfyUI then does not check limits
    itself."""
    signature = inspect.signature(early)
    missing = {name: None for name, each in signature.parameters.items() if each.default is each.empty}

    def check(**given: Any) -> bool | str:
        try:
            specs = inputs()
            known = {name: value if value is None else coerce(name, value, *specs[name]) for name, value in given.items()}
            early(**missing | known)
        except ValueError as error:
            return str(error)
        return True

    check.__signature__ = signature  # type: ignore[attr-defined]  # ComfyUI gives what it names
    return check


@contextlib.contextmanager
def renamed_input(loaders_name: str, nodes_name: str) -> Iterator[None]:
    """Context in which a ValueError about the loader's input `loaders_name` becomes one about the node's input
    `nodes_name`."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(f"{loaders_name}: "):
            raise
        raise ValueError(str(error).replace(loaders_name, nodes_name, 1)) from error


def _specs(types: dict[str, dict[str, tuple]]) -> dict[str, tuple]:
    """Return the required and optional inputs of INPUT_TYPES: name -> (type, options)."""
    groups = (types.get(group, {}) for group in ("required", "optional"))
    return {name: (*spec, {})[:2] for group in groups for name, spec in group.items()}


def defaults(types: dict[str, dict[str, tuple]]) -> dict[str, Any]:
    """Return the default of each input of INPUT_TYPES that has one."""
    return {name: options["default"] for name, (_, options) in _specs(types).items() if "default" in options}


def coerce(name: str, value: Any, kind: Any, options: dict[str, Any]) -> Any:
    """Convert the value to the input's type. Raises ValueError, which begins with `name`, if the value is not allowed."""
    if isinstance(kind, list):
        if not isinstance(value, str) or value not in kind:
            raise ValueError(f"{name}: {short(value)} is not one of {', '.join(map(str, kind[:20]))}.")
        return value
    check = CHECKS.get(kind)
    return value if check is None else check(name, value, options)


def short(value: Any) -> str:
    """Return the value as an error quotes it, cut to SHOWN characters."""
    text = repr(value) if isinstance(value, (str, float, bool, type(None))) else type(value).__name__
    if isinstance(value, int) and abs(value) < 10**SHOWN:
        text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _number(name: str, value: Any, options: dict[str, Any], whole: bool) -> int | float:
    try:
        number = int(value) if isinstance(value, int) or (whole and isinstance(value, str)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if number != number or abs(number) == math.inf or (whole and number != int(number)):
        raise ValueError(f"{name}: {short(value)} is not a {'whole ' * whole}number.")
    least, most = options.get("min", -math.inf), options.get("max", math.inf)
    if not least <= number <= most:
        raise ValueError(f"{name}: {short(number)} is not between {least} and {most}.")
    return int(number) if whole else float(number)


def _flag(name: str, value: Any, _options: dict[str, Any]) -> bool:
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{name}: {short(value)} is not true or false.")


def _text(name: str, value: Any, _options: dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{name}: {short(value)} is not a text.")


def _latent(name: str, value: Any, _options: dict[str, Any]) -> dict[str, Any]:
    samples: Any = value.get("samples") if isinstance(value, dict) else None
    parts = samples.unbind() if getattr(samples, "is_nested", False) else [samples]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise ValueError(f"{name}: this is not a latent. Connect an Empty Latent node, a VAE encoder or a sampler.")
        if part.ndim not in (3, 4, 5) or 0 in part.shape or not part.is_floating_point():
            raise ValueError(
                f"{name}: a latent of dtype {part.dtype} and shape {list(part.shape)} cannot be used. Use an Empty "
                "Latent node or a VAE encoder made for the model."
            )
    return value


def _conditioning(name: str, value: Any, _options: dict[str, Any]) -> Any:
    fits = isinstance(value, (list, tuple)) and all(
        isinstance(part, (list, tuple)) and len(part) == 2 and isinstance(part[1], dict) for part in value
    )
    if not fits or not all(isinstance(part[0], torch.Tensor) or part[0] is None for part in value):
        raise ValueError(f"{name}: this is not a conditioning. Connect a CLIP Text Encode node.")
    return value


def _image(name: str, value: Any, _options: dict[str, Any]) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: this is not an image. Connect a Load Image node.")
    if value.ndim != 4 or 0 in value.shape or not value.is_floating_point():
        raise ValueError(f"{name}: a tensor of dtype {value.dtype} and shape {list(value.shape)} is not an image.")
    return value


CHECKS: dict[str, Callable[[str, Any, dict[str, Any]], Any]] = {
    "INT": functools.partial(_number, whole=True),
    "FLOAT": functools.partial(_number, whole=False),
    "BOOLEAN": _flag,
    "STRING": _text,
    "LATENT": _latent,
    "IMAGE": _image,
    "CONDITIONING": _conditioning,
}
