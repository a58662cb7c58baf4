"""The slots of a model's block lists on one stage. A slot holds a block of the stage, or a stand-in (stand_ins.py).

The model's loop over its blocks runs unchanged and every block keeps its index, since models pick values by index (Chroma's
modulation, a ControlNet's residuals). A stand-in before the stage's blocks returns the hidden states received, whatever its
arguments. The first stand-in after them ends the forward with the hidden states to send.

In families of `whole_latent` the hidden states, which are the image's alone, are the rank's tokens inside a block list,
and all ranks' tokens outside. The first slot of a list cuts its arguments down. The last slot puts its results into whole
tensors, which are zero elsewhere.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_backend.core.signatures import method_parameters
from parallel_backend.families.base.blocks import BlockList
from parallel_backend.families.base.step_inputs import Rows

IMAGE, TEXT = "hidden_states", "encoder_hidden_states"
"""Arguments of a block for the streams."""


class StageDone(Exception):
    """Not an error: ends the forward of a stage without epilogue. Carries [b, t, hidden] and [b, n, hidden]."""

    def __init__(self, text: torch.Tensor, image: torch.Tensor):
        self.text, self.image = text, image


class Residual(NamedTuple):
    """What a control adds to a block's output: [b, n, hidden], and [b, t, hidden] if it adds to the text too."""

    image: torch.Tensor
    text: torch.Tensor | None = None


@dataclass
class StageIO:
    """Input and output of a stage in the micro-step under way: b batch entries, t text and n image tokens of the rank."""

    text_first: bool
    received: torch.Tensor | None = None
    """[b, t + n, hidden], text first. None on the first stage."""
    text_tokens: int = 0
    """t."""
    rows: Rows | None = None
    """None if the forward gets the rank's tokens only."""
    residuals: dict[str, Residual] = field(default_factory=dict)
    """"<list>.<index>" of a block -> what a control adds to its output."""
    _made: dict[str, tuple[Any, Any]] = field(default_factory=dict, init=False)

    def once(self, name: str, value: Any, make: Callable[[], Any]) -> Any:
        """`make()`, computed once in a micro-step for all blocks that get the same object `value` as argument `name`."""
        if name not in self._made or self._made[name][0] is not value:
            self._made[name] = value, make()
        return self._made[name][1]

    def begin_step(
        self,
        received: torch.Tensor | None,
        text_tokens: int,
        rows: Rows | None,
        residuals: dict[str, Residual] | None = None,
    ) -> None:
        """A micro-step begins. `received`: the result of `outgoing` on the stage before."""
        self.received, self.text_tokens, self.rows, self.residuals = received, text_tokens, rows, residuals or {}
        self._made.clear()

    def streams_received(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Text and image of `received`, which stand for the output of an earlier stage's block."""
        assert self.received is not None
        return self.received[:, : self.text_tokens], self.received[:, self.text_tokens :]

    @staticmethod
    def outgoing(done: StageDone) -> torch.Tensor:
        """[b, t + n, hidden] to send."""
        return torch.cat((done.text, done.image), dim=1)


class BlockSlot:
    """One place in a block list: binds arguments by name, cuts them to the rank's tokens, makes results whole.

    Text [b, t, hidden] and image [b, n, hidden] of a block are two tensors here, also where the block has them joined.
    """

    def __init__(self, spec: BlockList, stage_io: StageIO, block_class: type[nn.Module], index: int, count: int):
        self.spec, self.stage_io, self.name = spec, stage_io, f"{spec.name}.{index}"
        self.first, self.last = index == 0, index == count - 1
        self._names = method_parameters(block_class.forward)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A block's arguments by name, including those in its `**kwargs`, without those in its `*args`."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A block's arguments by name, cut to the rank's tokens."""
        return self._cut(self.named(args, kwargs))

    def _cut(self, values: dict[str, Any]) -> dict[str, Any]:
        spec, rows = self.spec, self.stage_io.rows
        if rows is None:
            return values
        for name, cut in spec.cuts.items():
            if (value := values.get(name)) is not None:
                values[name] = self.stage_io.once(name, value, functools.partial(cut, value, rows))
        if self.first:  # later slots get the hidden states that an earlier slot has cut
            values[IMAGE] = rows.of_image(values[IMAGE], 1)
        return values

    def streams(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Text and image among the values that `arguments` returned. A block without text has t = 0."""
        image = values[IMAGE]
        if self.spec.joined:
            t = self.stage_io.text_tokens
            n = image.shape[1] - t
            return (image[:, :t], image[:, t:]) if self.stage_io.text_first else (image[:, n:], image[:, :n])
        return values[TEXT] if "text" in self.spec.returns else image[:, :0], image

    def results(self, text: torch.Tensor | None, image: torch.Tensor) -> Any:
        """Text and image in the form in which the block returns them."""
        if self.spec.joined:
            assert text is not None
            return torch.cat((text, image) if self.stage_io.text_first else (image, text), 1)
        out = tuple(text if name == "text" else image for name in self.spec.returns)
        return out if len(out) > 1 else out[0]

    def unchanged(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a block that changes nothing, for the arguments of its `forward`."""
        return self.results(*self.streams(self.named(args, kwargs)))

    def emit(self, text: torch.Tensor | None, image: torch.Tensor) -> Any:
        """`results`, after the last slot of a list as whole tensors. `text` is None if the block returns none."""
        rows = self.stage_io.rows
        if rows is None or not self.last:
            return self.results(text, image)
        # Zeros suffice for other ranks' tokens: behind the list the model works on each token alone, and of the output only
        # the rank's tokens are used.
        padded_image = image.new_zeros(len(image), rows.image_tokens, image.shape[-1])
        padded_image[:, rows.image] = image
        return self.results(None, padded_image)

    def add_residual(self, out: Any) -> Any:
        """A block's results plus its control's residual, added behind the block as in ComfyUI's native models."""
        residual = self.stage_io.residuals.get(self.name)
        if residual is None:
            return out
        text, image = self._parts(out)
        if residual.text is not None:
            assert text is not None, "a control that adds to the text is for models of one joint sequence"
            text = text + residual.text
        return self.results(text, image + residual.image)

    def attach(self, block: nn.Module, whole_latent: bool) -> None:
        """Hook the slot into a block of the stage."""
        if whole_latent:
            block.register_forward_pre_hook(
                lambda _block, args, kwargs: ((), self._cut(self.named(args, kwargs))), with_kwargs=True
            )
        block.register_forward_hook(lambda _block, _args, out: self._after(out))

    def _after(self, out: Any) -> Any:
        """The block's results as the model's code expects them."""
        out = self.add_residual(out)
        return self.emit(*self._parts(out)) if self.last and self.stage_io.rows is not None else out

    def _parts(self, out: Any) -> tuple[Any, torch.Tensor]:
        """Text (None if the block returns None) and image of a block's results."""
        if self.spec.joined or len(self.spec.returns) == 1:
            return self.streams({IMAGE: out})
        named = dict(zip(self.spec.returns, out, strict=True))
        return named["text"], named["image"]
