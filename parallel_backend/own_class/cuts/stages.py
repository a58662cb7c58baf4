"""Splits a class's blocks over stages. Each stage runs the class's forward, with stand-ins for the other stages' blocks.

A stand-in returns new tensors, because the class may write into them. They are NaN, so a result that depends on another
stage's value is not finite. The last one before the stage's first block returns what the previous stage sends.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.call_arguments import OPTIONS
from parallel_backend.own_class.calls.residuals import CONTROL, ReadResiduals, fitted, with_patches
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import Attend, attention_by, call_itself, replace_attention
from parallel_backend.own_class.cuts.forwards import put_forwards
from parallel_backend.own_class.cuts.guided_attention import GUIDED, SECOND, Guide, SecondText, Sum, own_sums
from parallel_backend.own_class.cuts.token_cut import TokenCut


class LaterStages(Exception):
    """Not an error: ends the class's forward on a stage that is not the last one, once its blocks have run."""


Wanted = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor that a stage receives."""


class Link(Protocol):
    """Transfers to and from the neighbouring stages."""

    def receive(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Return the tensors that the previous stage sends for the present call, in order."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor to the next stage. The caller must not change it until it has been sent."""


def pass_through(model: nn.Module, blocks: Sequence[OwnBlock]) -> ExitStack:
    """Have these blocks return their arguments without computing, until the stack is closed."""
    return put_forwards((model.get_submodule(block.name), functools.partial(_pass, block)) for block in blocks)


def _pass(block: OwnBlock, *args: Any, **kwargs: Any) -> Any:
    found = [_argument(place, args, kwargs) if place else None for place in block.returns]
    return found[0] if block.alone else tuple(found)


class StageBlocks:
    """The blocks of one stage, `span` of `blocks`: all blocks of `model` in the order in which they run. `tokens`: splits
    tokens over the stage's sequence ranks, or into bands. None: every rank has all tokens."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[OwnBlock], span: Span, link: Link | None, tokens: TokenCut | None = None
    ):
        self._model, self.blocks, self._span, self._link, self.tokens = model, blocks, span, link, tokens
        self.residuals: Callable[[], Mapping[str, torch.Tensor]] = dict
        """Returns the residuals of the present call (ControlNet), by name."""
        self.add_up: Sum = own_sums
        """Sums over ranks with other heads, if attention is guided."""
        self.attend: Attend | None = None
        """Computes attention in calls whose tokens are not cut. None: the class's own functions do."""
        self.running = ""
        """Name of the block that is computing. Empty between blocks."""
        self.skipped: Collection[str] = ()
        """Names of the blocks that return their arguments in the present call."""
        self._guide, self._second = Guide(), SecondText(model)
        self._next = 0  # number of the block that runs next
        self._leaves = False  # tokens leave behind the one before it
        self._cut: TokenCut | None = None  # `tokens`, if it cuts the present call
        self._received, self._sent = (crossing(blocks, at) if at < len(blocks) else [] for at in (span.start, span.stop))
        self._values: dict[int, Sequence[torch.Tensor]] = {}  # of this call, by number: what such blocks return
        self._forwards = {block.name: model.get_submodule(block.name).forward for block in blocks}
        """Name of a block -> its class's forward."""
        runs = ((model.get_submodule(block.name), functools.partial(self._run, at)) for at, block in enumerate(blocks))
        self._undo = put_forwards(runs)
        self._undo.callback(replace_attention())

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on the last stage, None on others. Raises Unproven if blocks run otherwise than in the
        trial."""
        self._next, self._cut, self.running = 0, None, ""
        if self.tokens is not None and self.tokens.cuts:
            self._cut = self.tokens
            self._cut.begin()
        if kwargs.get(CONTROL) is not None:
            read = {kind: ReadResiduals(each, self._residual) for kind, each in kwargs[CONTROL].items()}
            kwargs = {**with_patches(kwargs, self._residual, self._residual_of_all), CONTROL: read}
        if GUIDED in (options := kwargs.get(OPTIONS) or {}):
            kwargs = {**kwargs, OPTIONS: self._guide.options(options, self._cut, self.add_up)}
        attend = self.attend if self._cut is None else self._cut.attend
        second = kwargs.pop(SECOND, None)
        texts = nullcontext() if second is None else self._with_second_text(second, kwargs)
        try:
            with nullcontext() if attend is None else attention_by(attend), texts:
                out = self._model(*args, **kwargs)
        except LaterStages:
            return None
        finally:
            self._values.clear()
        if self._next < len(self.blocks):
            raise Unproven(f"{self._next} of {len(self.blocks)} blocks ran")
        return out

    def _with_second_text(self, second: Mapping[str, Any], named: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Context of a call with a second text."""
        whole = self.attend or call_itself
        cut = (whole, whole) if self._cut is None else (self._cut.attend, self._cut.attend_whole)
        return self._second.of_call(second, named["context"], self.add_up, *cut)

    def _residual(self, residual_BND: torch.Tensor) -> torch.Tensor:
        """Return the rows of a residual for the tokens that the class has at the point where it adds the residual."""
        if self._cut is None:
            return residual_BND
        return self._cut.residual(residual_BND, is_cut=self._next > 0 and not self._leaves)

    def _residual_of_all(self, residual_BSD: torch.Tensor, tokens: int) -> torch.Tensor:
        """Like `_residual`, for a residual of all tokens of a block (residuals.AROUND). `tokens`: their number."""
        if self._cut is None or self._leaves:
            return fitted(residual_BSD, tokens)
        return self._cut.residual_of_all(residual_BSD)

    def close(self) -> None:
        """Restore the forwards of the model's modules."""
        self._second.close()
        self._undo.close()

    def wrap(self, block: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the block's forward with `wrapper(its forward)`. Exchanges between stages and ranks stay outside of it."""
        self._forwards[block] = wrapper(self._forwards[block])

    def _run(self, number: int, *args: Any, **kwargs: Any) -> Any:
        if number != self._next:
            raise Unproven(f"{self.blocks[number].name} ran as block {self._next + 1}, and as {number + 1} in the trial")
        self._next += 1
        if self._cut is not None:
            args, kwargs = self._cut.enter(number, args, kwargs)
        self._leaves = self._cut is not None and self._cut.leaves(number)
        if number not in range(self._span.start, self._span.stop):
            out = self._stand_in(number, args, kwargs)
            return self._cut.leave(out, number == self._span.start - 1) if self._cut is not None and self._leaves else out
        block = self.blocks[number]
        if block.name in self.skipped:
            out = _pass(block, *args, **kwargs)
        else:
            self.running, forward = block.name, self._forwards[block.name]
            out = forward(*args, **kwargs) if self._cut is None else self._cut.run(forward, args, kwargs)
            self.running = ""
        values = (out,) if isinstance(out, torch.Tensor) else out
        shapes = [None if value is None else value.shape for value in values]
        if shapes != [_argument(place, args, kwargs).shape if place else None for place in block.returns]:
            raise Unproven(f"{block.name} returns different values from those in the trial")
        if number in self._sent:
            self._values[number] = [value for value in values if value is not None]
        if number == self._span.stop - 1 and self._span.stop < len(self.blocks):
            assert self._link is not None
            for tensor in itertools.chain.from_iterable(self._values[each] for each in self._sent):
                self._link.send(tensor)
            raise LaterStages
        return self._cut.leave(out) if self._cut is not None and self._leaves else out

    def _stand_in(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        block = self.blocks[number]
        likes = [_argument(place, args, kwargs) for place in block.returns if place]
        if number == self._span.start - 1:
            own = self._receive([(like.shape, like.dtype) for like in likes])
        else:
            own = [torch.full_like(like, math.nan) for like in likes]
        if number in self._received:
            self._values[number] = own
        values = iter(own)
        found = [next(values) if place else None for place in block.returns]
        return found[0] if block.alone else tuple(found)

    def _receive(self, last: Sequence[Wanted]) -> list[torch.Tensor]:
        """Return the tensors that the block before the stage's first one returns, of these shapes. Outputs of earlier blocks
        that the class reads later are received too, and copied into the tensors that the class already has."""
        assert self._link is not None
        earlier = list(itertools.chain.from_iterable(self._values[each] for each in self._received[:-1]))
        values = self._link.receive([*((each.shape, each.dtype) for each in earlier), *last])
        for tensor, value in zip(earlier, values[: len(earlier)], strict=True):
            tensor.copy_(value)
        return values[len(earlier) :]


def crossing(blocks: Sequence[OwnBlock], at: int) -> list[int]:
    """Return the numbers of the blocks before number `at` whose outputs a stage that begins there must receive, in order."""
    coming = {block.name for block in blocks[at:]}
    return [number for number, block in enumerate(blocks[:at]) if block.until in coming or number == at - 1]


def _argument(place: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the argument at a place: see OwnBlock.returns."""
    first, *inside = _steps(place)
    value = kwargs[first] if isinstance(first, str) else args[first]
    for index in inside:
        value = value[index]
    return value


@functools.cache
def _steps(place: str) -> tuple[Any, ...]:
    """Return the parts of a place: an argument's name or position, then positions inside of it."""
    return tuple(int(step) if step.isdecimal() else step for step in place.split("/"))
