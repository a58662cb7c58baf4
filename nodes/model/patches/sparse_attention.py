"""ComfyUI's node *Model Sparse Attention*, as settings for the ranks.

The node puts an override of attention on the MODEL, and for MiniMax H3 a patch around each block. Neither can run on the
ranks. Both contain the node's settings, with which the ranks call the same kernel of comfy-kitchen.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from parallel_backend.core.sparse_attention import SparseAttention

from ...ui.other_nodes import is_known

OVERRIDE = re.compile(r"nodes_sparse_attention\.make_attention_override\.<locals>\.override")
"""The node's override of attention. Calls that are not sparse go to the override that was there before."""
BLOCK = re.compile(r"nodes_sparse_attention\.make_h3_block_patch\.<locals>\.block_patch")
"""The node's patch around a block of MiniMax H3."""
PREPARE = re.compile(r"nodes_sparse_attention\.apply_block_sparse_attention\.<locals>\.<lambda>")
"""The node's callback before each evaluation, which puts its override on top again. Evaluations may come in any order."""
OFF = "off"
"""Value of the widget sink_conditioning."""


def is_sparse(override: Any) -> bool:
    """Whether an override of attention is the node's."""
    return callable(override) and is_known(OVERRIDE, override)


def below(override: Any) -> Any:
    """The override that was there before the node's; or the override itself if it is not the node's. None: there is none."""
    while is_sparse(override):
        override = inspect.getclosurevars(override).nonlocals.get("previous")
    return override


def settings_of(
    override: Any,
    of_block: Callable[..., Any] | None,
    counts: Mapping[str, int],
    options: Mapping[str, Any],
) -> SparseAttention | None:
    """The settings in a model call. None: its attention is dense, as outside of the node's start_percent and end_percent.

    `counts`: number of blocks in each list. `override`: of attention, by any node. `of_block`: the node's patch of a block,
    if blocks have one. `options`: the call's transformer_options.
    """
    # The override of the newest such node is on top, and decides.
    function = override if is_sparse(override) else of_block
    if function is None:
        return None
    patch = inspect.getclosurevars(function).nonlocals["patch"]
    sigmas = options.get("sigmas")  # None: no sampler makes the call
    if sigmas is not None and not patch.sigma_end <= float(sigmas.flatten()[0]) <= patch.sigma_start:
        return None
    if patch.vsa and of_block is None:  # for VSA the override leaves attention to the patches of blocks
        return None
    full = [f"{name}.{index}" for name, count in counts.items() for index in patch.dense_blocks if index < count]
    return SparseAttention(
        tau=patch.tau,
        kept=patch.topk_ratio,
        extra_tokens=patch.extra_tokens,
        least_tokens=patch.min_tokens,
        full=tuple(sorted(full)),
        sinks="" if patch.sink_conditioning == OFF else patch.sink_conditioning,
        cubes=patch.vsa,
    )
