"""torch.compile of a stage's blocks: graphs per block class and shape, as in diffusers' `compile_repeated_blocks`.

Exchanges between stages and ranks stay outside of a block's graphs (StageBlocks.wrap). Attention, packed weights, and layers
with hooks, such as those of tensor parallelism, run between two graphs. So all blocks of a class share their graphs. No
graph contains a transfer or a K/V buffer, and all ranks transfer in the code's order.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from parallel_backend.core.cores import usable_cores
from parallel_backend.own_class.cuts.attention_calls import replacement_of, trace_attention_by
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.lifecycle import COMPILING

from .linear import PackedLinear
from .module_cache import CachedModule
from .tensor_parallel import SharedRMSNorm

log = logging.getLogger(__name__)

VARIANTS = 128
"""Maximum number of graphs for one piece of code. It has one for each height of a band, with and without text, each memory
layout of its inputs, and each further size and prompt length. Beyond this limit torch runs the code uncompiled."""

WORKERS = 8
"""Maximum number of processes in which a rank compiles."""

Wrap = Callable[[str, Callable[[Callable[..., Any]], Callable[..., Any]]], None]
"""The signature of StageBlocks.wrap."""


@functools.cache
def _between(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` whose modules are called between two graphs. Cached, since torch recompiles for another class."""
    return type(kind.__name__, (kind,), {"__call__": torch.compiler.disable(kind.__call__)})


@torch.compiler.disable
def _attend(function: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a class's attention function, given by the name of its replacement."""
    return replacement_of(function)(*args, **kwargs)


class Compiler:
    """Compiles a stage's blocks. Each graph is compiled at the first call that needs it. `graphs`: number of compiled
    graphs. If a graph cannot be compiled, compilation is turned off, with a warning that says why."""

    def __init__(self, blocks: Mapping[str, nn.Module], ranks: int, heartbeat: Heartbeat, wrap: Wrap):
        """`blocks`: by name in the model, with weights and tensor plan in place. `ranks`: number of ranks on this machine.
        `heartbeat`: reports that a graph is being compiled."""
        self.graphs, self._failed, self._heartbeat = 0, False, heartbeat
        trace_attention_by(_attend)
        # Settings of the process, equal for all of its models. After an error in tracing torch warns and runs the code.
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = 16 * VARIANTS
        torch._inductor.config.compile_threads = max(1, min(WORKERS, usable_cores() // ranks))
        for name, block in blocks.items():
            for module in block.modules():
                if module is not block and _stays_outside(module):
                    module.__class__ = _between(type(module))
            wrap(name, functools.partial(torch.compile, backend=self._backend, dynamic=False))

    def close(self) -> None:
        """Free all graphs of the process, because graphs keep their blocks in memory. Other models compile again when
        used."""
        torch._dynamo.reset()

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """torch.compile's backend: compiles with Inductor, or returns the graph itself once compilation is off."""
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


def _stays_outside(module: nn.Module) -> bool:
    """Whether a module must run outside of graphs, because it has transfers, hooks, a packed weight, or a forward of its
    own. torch would trace such a forward again for every block."""
    opaque = isinstance(module, (PackedLinear, SharedRMSNorm, CachedModule)) or "forward" in vars(module)
    return opaque or bool(module._forward_hooks or module._forward_pre_hooks)
