"""torch.compile of a stage's blocks: one graph per block class and shape, as in diffusers' `compile_repeated_blocks`.

A block's hooks (block_slots.py) stay outside its graph. Inside the graph these are opaque operations: attention (the
layer's ParallelAttention), layers with a hook of tensor parallelism, packed weights, cached modules (module_cache.py). An
operation has its module's name in the block and looks the module up when it runs. So all blocks of a class share their
graphs, and no graph contains a layer's number, a transfer or a K/V buffer.

All operations declare that they write to one tensor, which keeps them in the code's order. A compiler may reorder
independent operations, and ranks with different shapes would then wait in different transfers.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel_backend.core.cores import usable_cores
from parallel_backend.rank.attention.parallel_attention import ParallelAttention
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.lifecycle import COMPILING

from .compiled_attention import trace_attention
from .linear import PackedLinear, RankLinear
from .module_cache import CachedModule
from .tensor_parallel import SharedRMSNorm

log = logging.getLogger(__name__)

VARIANTS = 128
"""Most graphs per block class. A class has one graph for each height of a band, with and without text, each memory layout of
its inputs, and each further size and prompt length. Above this limit torch runs the block uncompiled."""

WORKERS = 8
"""Most processes in which a rank compiles."""


@dataclass(frozen=True)
class TracedModules:
    """The modules behind one block's operations, by name in the block."""

    attentions: dict[str, ParallelAttention] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)


_traced: ContextVar[TracedModules] = ContextVar("modules of the block under way")


@torch.library.custom_op(
    "parallel_dit::attend",
    mutates_args=("order",),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) order, str name, float? scale) -> Tensor",
)
def attend(query, key, value, order, name, scale):
    """ParallelAttention.attend of the block's attention module `name`: three [B, s, H, D] -> [B, s, H, D]."""
    return _traced.get().attentions[name].attend(query, key, value, scale).contiguous()


@attend.register_fake
def _(query, key, value, order, name, scale):
    return query.new_empty(query.shape)


@torch.library.custom_op(
    "parallel_dit::call", mutates_args=("order",), schema="(Tensor x, Tensor(a!) order, str name, int? width) -> Tensor"
)
def call(x, order, name, width):
    """The block's module `name`, uncompiled: x [..., n] -> [..., width], or [..., n] without `width`."""
    module = _traced.get().modules[name]
    return module.outside.kind.__call__(module, x).contiguous()


@call.register_fake
def _(x, order, name, width):
    return x.new_empty(x.shape if width is None else (*x.shape[:-1], width))


class GraphAttention:
    """Stands in for a ParallelAttention inside a graph. Not a dataclass: torch would compare the layer's number too."""

    def __init__(self, name: str, order: torch.Tensor):
        self.name, self.order = name, order

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ParallelAttention.attend."""
        assert mask is None, "this family's own forward passes an attention mask"
        return torch.ops.parallel_dit.attend(query, key, value, self.order, self.name, scale)


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
        wrap: Wrap | None = None,
    ):
        """`blocks` by name in the model, with weights, tensor plan and parallel attention in place.

        `widths(layer)`: output features of a linear layer over all ranks. `ranks`: ranks that share the machine.
        `heartbeat` says while a graph is compiled. `wrap`: of blocks of ComfyUI's own class, in which attention is the
        class's functions, and modules may take and return anything.
        """
        self.graphs, self._failed, self._widths = 0, False, widths
        self._heartbeat, self._wrap = heartbeat, wrap
        self._order = _order(device)
        if wrap is not None:
            trace_attention(self._order)
        # Settings of the process, equal for all of its models. After an error in tracing torch warns and runs the code.
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = 16 * VARIANTS
        torch._inductor.config.compile_threads = max(1, min(WORKERS, usable_cores() // ranks))
        for name, block in blocks.items():
            self._prepare(name, block)

    def close(self) -> None:
        """Free the graphs, which keep the blocks alive. Other models of the process compile anew at their next use."""
        torch._dynamo.reset()

    def _prepare(self, block_name: str, block: nn.Module) -> None:
        traced = TracedModules()
        for name, module in block.named_modules():
            processor = getattr(module, "processor", None)
            if isinstance(attention := getattr(processor, "_parallel_config", None), ParallelAttention):
                traced.attentions[name] = attention
                module.processor._parallel_config = GraphAttention(name, self._order)
            elif name and self._stays_outside(module):
                is_layer = isinstance(module, (RankLinear, SharedRMSNorm))
                form = _outside if is_layer or self._wrap is None else _between
                if form is _outside:
                    traced.modules[name], width = module, self._width(f"{block_name}.{name}", module)
                    module.outside = OutsideModule(type(module), name, self._order, width)
                module.__class__ = form(type(module))
        if self._wrap is None:
            block.forward = _compiled(block.forward, traced, self._backend)
        else:
            self._wrap(block_name, functools.partial(_compiled, traced=traced, backend=self._backend))

    def _width(self, name: str, module: nn.Module) -> int | None:
        """Output features of the model's module `name`. None: as many as of the input."""
        if isinstance(module, nn.Sequential):
            *_, (last, layer) = module.named_children()
            return self._width(f"{name}.{last}", layer)
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


def _compiled(forward: Callable[..., Any], traced: TracedModules, backend: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a block, compiled. Its operations find the block's modules in `traced`."""
    compiled = torch.compile(forward, backend=backend, dynamic=False)

    @functools.wraps(forward)  # diffusers passes on the arguments that it finds in the signature
    def run(*arguments: Any, **named: Any) -> Any:
        token = _traced.set(traced)
        try:
            return compiled(*arguments, **named)
        finally:
            _traced.reset(token)

    return run
