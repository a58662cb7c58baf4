"""torch.compile of a stage's blocks: one graph per block class and shape, as in diffusers' `compile_repeated_blocks`.

What stages and ranks exchange stays outside of a block's graph (StageBlocks.wrap). Inside the graph these are opaque
operations: attention (compiled_attention.py), layers with a hook of tensor parallelism, packed weights. An operation has its
module's name in the block and looks the module up when it runs. So all blocks of a class share their graphs, and no graph
contains a layer's number, a transfer or a K/V buffer. Other modules that torch cannot trace are called between two graphs.

All operations declare that they write to one tensor, which keeps them in the code's order. A compiler may reorder
independent operations, and ranks with different shapes would then wait in different transfers.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from parallel_backend.core.cores import usable_cores
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.lifecycle import COMPILING

from .compiled_attention import trace_attention
from .linear import PackedLinear, RankLinear
from .module_cache import CachedModule
from .tensor_parallel import SharedRMSNorm

log = logging.getLogger(__name__)

VARIANTS = 128
"""Maximum graphs per class. A class has one graph for each height of a band, with and without text, each memory layout of
its inputs, and each further size and prompt length. Above this limit torch runs the block uncompiled."""

WORKERS = 8
"""Maximum number of processes in which a rank compiles."""


Modules = Mapping[str, nn.Module]
"""The modules behind one block's operations, by name in the block."""

_traced: ContextVar[Modules] = ContextVar("modules of the block in progress")


@torch.library.custom_op(
    "parallel_dit::call", mutates_args=("order",), schema="(Tensor x, Tensor(a!) order, str name, int? width) -> Tensor"
)
def call(x, order, name, width):
    """The block's module `name`, uncompiled: x [..., n] -> [..., width], or [..., n] without `width`."""
    module = _traced.get()[name]
    return module.outside.kind.__call__(module, x).contiguous()


@call.register_fake
def _(x, order, name, width):
    return x.new_empty(x.shape if width is None else (*x.shape[:-1], width))


@dataclass
class OutsideModule:
    """Set as `outside` on a module that is called as one operation."""

    kind: type[nn.Module]
    """The module's class before."""
    name: str
    order: torch.Tensor
    """The tensor that all operations declare to write to."""
    width: int | None
    """Features of the output. None: as many as of the input."""


@functools.cache
def _outside(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` whose modules are called as one operation. Cached, since torch recompiles for another class."""

    def __call__(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        outside = self.outside
        return torch.ops.parallel_dit.call(x, outside.order, outside.name, outside.width)

    return type(kind.__name__, (kind,), {"__call__": __call__})


@functools.cache
def _between(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` whose modules are called between two graphs. Cached, as in _outside."""
    return type(kind.__name__, (kind,), {"__call__": torch.compiler.disable(kind.__call__)})


@functools.cache
def _order(device: torch.device) -> torch.Tensor:
    """The tensor that the device's operations declare to write to."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


Wrap = Callable[[str, Callable[[Callable[..., Any]], Callable[..., Any]]], None]
"""StageBlocks.wrap."""


class Compiler:
    """Compiles a stage's blocks, each graph at the first call that needs it. `graphs` counts the graphs.

    The first graph that cannot be compiled turns compilation off, with a warning that says why.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        widths: Callable[[str], int],
        device: torch.device,
        ranks: int,
        heartbeat: Heartbeat,
        wrap: Wrap,
    ):
        """`blocks` by name in the model, with weights and tensor plan in place.

        `widths(layer)`: output features of a linear layer over all ranks. `ranks`: ranks that share the machine.
        `heartbeat` says while a graph is compiled.
        """
        self.graphs, self._failed, self._widths, self._heartbeat = 0, False, widths, heartbeat
        self._order = _order(device)
        trace_attention(self._order)
        # Settings of the process, equal for all of its models. After an error in tracing torch warns and runs the code.
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = 16 * VARIANTS
        torch._inductor.config.compile_threads = max(1, min(WORKERS, usable_cores() // ranks))
        for name, block in blocks.items():
            wrap(name, functools.partial(_compiled, traced=self._prepare(name, block), backend=self._backend))

    def close(self) -> None:
        """Free all graphs of the process, since graphs keep their blocks in memory. Other models compile again when used."""
        torch._dynamo.reset()

    def _prepare(self, block_name: str, block: nn.Module) -> Modules:
        """Take modules that torch cannot trace out of the block's graphs. Returns those behind operations."""
        traced: dict[str, nn.Module] = {}
        for name, module in block.named_modules():
            if not name or not self._stays_outside(module):
                continue
            form, layer = _between, cast(Any, module)
            if isinstance(module, (RankLinear, SharedRMSNorm)):
                form, traced[name] = _outside, module
                layer.outside = OutsideModule(type(module), name, self._order, self._width(f"{block_name}.{name}", module))
            layer.__class__ = form(type(module))
        return traced

    def _width(self, name: str, module: nn.Module) -> int | None:
        """Output features of the model's module `name`. None: as many as of the input."""
        if not isinstance(module, RankLinear):
            return None
        # A hook adds up or gathers over the ranks. A column-cut layer without a hook returns the rank's features.
        return self._widths(name) if module._forward_hooks else module.weight_shape[0]

    @staticmethod
    def _stays_outside(module: nn.Module) -> bool:
        """Whether a module has transfers, hooks or a forward of its own, which torch would trace again for every block, or a
        packed weight."""
        opaque = isinstance(module, (PackedLinear, SharedRMSNorm, CachedModule)) or "forward" in vars(module)
        return opaque or bool(module._forward_hooks or module._forward_pre_hooks)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """torch.compile's backend: Inductor's code, or the graph itself once compilation is off."""
        from torch._inductor.compile_fx import compile_fx

        if not self._failed:
            try:
                with self._heartbeat.within(COMPILING):  # a graph may take a minute
                    compiled = compile_fx(graph, inputs)
                self.graphs += 1
                return compiled
            except Exception as error:
                self._failed = True
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                log.warning("Parallel DiT: compile: the model runs uncompiled, because torch.compile failed: %s", reason)
        return graph.forward


def _compiled(forward: Callable[..., Any], traced: Modules, backend: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a block, compiled. Its operations find the block's modules in `traced`."""
    compiled = torch.compile(forward, backend=backend, dynamic=False)

    def run(*arguments: Any, **named: Any) -> Any:
        token = _traced.set(traced)
        try:
            return compiled(*arguments, **named)
        finally:
            _traced.reset(token)

    return run
