"""Reads the prompt that ComfyUI is executing: its id and its graph."""

from collections.abc import Mapping
from typing import Any

from comfy_execution.utils import get_executing_context

from .other_nodes import COMFYUI

Graph = Mapping[str, Mapping[str, Any]]
"""A prompt in ComfyUI's API form: id of a node -> its class_type and inputs. A link is a list [id, output]."""


def present_prompt() -> str | None:
    """Return the id of the prompt, or None if nodes are run from Python, without a prompt."""
    context = get_executing_context()
    return None if context is None else context.prompt_id


def executing() -> tuple[Graph, str] | None:
    """Return the prompt's graph and the id of the node that is being executed, or None if nodes are run from Python."""
    context = get_executing_context()
    if context is None:
        return None
    from server import PromptServer

    if (queue := PromptServer.instance.prompt_queue) is None:  # a server without one, such as of a script that runs nodes
        return None
    running, _ = queue.get_current_queue_volatile()
    return next(((graph, context.node_id) for _, number, graph, *_ in running if number == context.prompt_id), None)


def loader_inputs(graph: Graph, node: str) -> Mapping[str, Any] | None:
    """Return the inputs of the node that loads the MODEL of `node`, possibly through other nodes, or None if it is
    unknown."""
    seen: set[str] = set()
    while node in graph and node not in seen:
        seen.add(node)
        sources = [source for source, output in _links(graph, node) if _output_type(graph[source], output) in ("MODEL", "*")]
        if not sources:
            return graph[node]["inputs"] if len(seen) > 1 else None
        if len(sources) > 1:
            return None
        node = sources[0]
    return None


def _links(graph: Graph, node: str) -> list[tuple[str, Any]]:
    """Return (node, output) for each output that is linked to the node."""
    links = (value for value in graph[node]["inputs"].values() if isinstance(value, list) and len(value) == 2)
    return [(source, output) for source, output in links if isinstance(source, str) and source in graph]


def _output_type(node: Mapping[str, Any], output: Any) -> str:
    kind = COMFYUI.NODE_CLASS_MAPPINGS.get(node["class_type"])
    types = () if kind is None else kind.RETURN_TYPES
    return str(types[output]) if type(output) is int and 0 <= output < len(types) else ""
