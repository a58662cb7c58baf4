"""Holds a checkpoint to the class that computes it, built and run without memory: on torch's meta device.

A configuration may be within all bounds, and yet fit neither the file's tensors nor itself. A rank that meets that while it
loads, or in its first micro-step, is of no use any more.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span
from parallel_backend.families import Family
from parallel_backend.families.base.file_layout import Source
from parallel_backend.families.base.step_inputs import Config, StepInputs
from parallel_backend.families.base.tensor_plan import CutKind, cut_of, cut_outside, cut_side

from .stand_in_values import NoFirstValues, StandInValues
from .tensor_files import Entry

SIDE, WORDS = 4, 16
"""Token rows and columns of the call that the class is run with, and its text tokens."""
UNFIT = (ValueError, RuntimeError, TypeError, ArithmeticError, LookupError, AssertionError, AttributeError, NameError)
"""What a class raises for arguments that do not fit each other."""
ON_META = "meta tensor"
"""In the text of torch's errors about a value that is asked of a tensor without values."""


def check_class(
    name: str, family: Family, config: Config, key_map: Mapping[str, Source], entries: Mapping[str, Entry]
) -> None:
    """ValueError, naming what does not fit, unless the class takes `config` and the tensors. `name`: the file's, for errors.

    The class's parameters have to be those of `key_map`, in the shapes of `entries`. Its forward has to run, with the first
    block of each list. Importing the class takes seconds, once in a process; the rest a fraction of one.
    """
    try:
        shapes, whole = _class_shapes(_Configured(family.name, repr(sorted(config.items())), family, config))
    except UNFIT as error:
        raise ValueError(
            f"model_name: {name} has a configuration with which {family.name} cannot be computed "
            f"({type(error).__name__}: {short(error, 200)}). It is damaged, or of a model that this version does not know."
        ) from None
    for target in shapes.keys() ^ key_map.keys():
        raise ValueError(f"model_name: {name} has a configuration with which {family.name} has no {short(target)}.")
    for target, source in key_map.items():
        stored, shape = entries[source.key], shapes[target]
        if not fits(source.shape(stored.shape), shape, target in whole):
            raise ValueError(
                f"model_name: {name} has {short(source.key)} of shape {short(list(stored.shape))}, where {family.name} "
                f"has {list(shape)} for {short(target)}."
            )


def fits(stored: tuple[int, ...], shape: tuple[int, ...], whole: bool) -> bool:
    """Whether values of the shape `stored` are a parameter's. Sizes of 1 are ignored, since GGUF's tools may drop them, but
    not of a parameter that ranks cut as it is stored (`whole`)."""
    return stored == shape if whole else _without_ones(stored) == _without_ones(shape)


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


@dataclass(frozen=True)
class _Configured:
    """A family with a configuration, which two names tell from others."""

    family_name: str
    settings: str
    family: Family = field(compare=False)
    config: Config = field(compare=False)


@functools.lru_cache(maxsize=16)
def _class_shapes(configured: _Configured) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """(parameter -> shape, parameters whose sides count) of a class that could be built and run.

    Sides count of linear layers' weights, and of what tensor parallelism cuts.

    Raises UNFIT if it could not.
    """
    family, config = configured.family, configured.config
    # The device's context holds for this thread alone, and drawing values on it leaves torch's generator as it is: a sampler
    # may be making its noise meanwhile.
    with torch.device("meta"), torch.inference_mode():
        with NoFirstValues():
            model: Any = family.transformer_class()(**config).eval()
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        large = {name for name, layer in linear.items() if cut_outside(family.tensor_plan, name, tuple(layer.weight.shape))}
        weights = {f"{name}.weight" for name in linear} | {f"{name}.bias" for name in large}
        whole = weights | _cut(family, config, shapes)
        try:
            _run(family, config, model)
        except NotImplementedError:  # an operation that exists for values alone
            pass
        except RuntimeError as error:
            if ON_META not in str(error).lower():
                raise
    return shapes, frozenset(whole)


def _cut(family: Family, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The parameters that tensor parallelism cuts. AssertionError if heads of their size do not make up the cut sides."""
    sizes = family.sizes
    parameters: set[str] = set()
    heads, head_size = sizes.heads(config), sizes.head_size(config)
    for name, shape in shapes.items():
        cut = cut_of(family.tensor_plan, name)
        if cut is None or (cut.kind is CutKind.ROW and len(shape) < 2):  # a bias that is added once is not cut
            continue
        cut_side(cut, shape[1 if cut.kind is CutKind.ROW else 0], heads, head_size, 0, 1)
        parameters.add(name)
    return parameters


def _run_once(block: nn.Module) -> nn.Module:
    """The block, which answers every call with what it made of the first one."""
    forward = block.forward
    made: list[Any] = []

    def first(*arguments: Any, **named: Any) -> Any:
        if not made:
            made.append(forward(*arguments, **named))
        return made[0]

    block.forward = first
    return block


def _run(family: Family, config: Config, model: nn.Module) -> None:
    """A call of the forward. Raises UNFIT if it fails, or if its output is no latent."""
    for spec in family.blocks.lists:
        if blocks := getattr(model, spec.name):
            setattr(model, spec.name, nn.ModuleList([_run_once(blocks[0])] * len(blocks)))
    patching = family.patching
    grid = ((1,) if patching.video else ()) + (SIDE, SIDE)
    tokens = patching.pack(torch.randn(1, family.sizes.latent_channels(config), *patching.whole(grid)))
    image, text = Span(0, tokens.shape[1]), Span(0, WORDS)
    example, order = family.example(config, WORDS), family.token_order(grid)
    step = StepInputs(tokens, torch.full((1,), 0.5), example, grid, order, image, text, len(text))
    with StandInValues():
        out = family.run(model, step)
    if out.shape[:2] != tokens.shape[:2] or out.shape[2] > tokens.shape[2]:
        raise ValueError(f"it makes {list(out.shape)} of tokens {list(tokens.shape)}")
