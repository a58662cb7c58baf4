"""The prompt that ComfyUI is executing: its id and its graph."""

from collections.abc import Mapping
from typing import Any

from comfy_execution.utils import get_executing_context

from .other_nodes import COMFYUI

Graph = Mapping[str, Mapping[str, Any]]
"""A prompt in ComfyUI's API form: number of a node -> its class_type and inputs. A link is [number, output]."""


def present_prompt() -> str | None:
    """Id of the prompt. None if nodes are run without one, from Python."""
    context = get_executing_context()
    return None if context is None else context.prompt_id


def feeds_a_sampler() -> bool:
    """Whether this prompt makes latents from the output of the node that is running.

    False if there is no such node: nodes may be run from Python, and a node may have made others that the prompt lacks.
    """
    return (found := executing()) is not None and is_sampled(*found)


def executing() -> tuple[Graph, str, list[str]] | None:
    """(graph of the prompt, id of the node that is being executed, ids of the prompt's outputs). None: nodes are run from
    Python."""
    context = get_executing_context()
    if context is None:
        return None
    from server import PromptServer

    if (queue := PromptServer.instance.prompt_queue) is None:  # a server without one, such as of a script that runs nodes
        return None
    running, _ = queue.get_current_queue_volatile()
    found = (
        (graph, context.node_id, outputs) for _, number, graph, _, outputs, *_ in running if number == context.prompt_id
    )
    return next(found, None)


def loader_inputs(graph: Graph, node: str) -> Mapping[str, Any] | None:
    """Inputs of the node that loads the MODEL which `node` takes, perhaps over other nodes. None: unknown."""
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


def is_sampled(graph: Graph, loader: str, outputs: list[str]) -> bool:
    """Whether a node on the way to `outputs` makes latents from the output of node `loader`, directly or through other
    nodes."""
    return any(
        loader in _sources(graph, [node])
        for node in _sources(graph, outputs)
        if node != loader and _makes(graph[node], "LATENT")
    )


def _sources(graph: Graph, nodes: list[str]) -> set[str]:
    """These nodes and all nodes whose outputs reach them."""
    found: set[str] = set()
    waiting = [node for node in nodes if node in graph]
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += [source for source, _ in _links(graph, node)]
    return found


def _links(graph: Graph, node: str) -> list[tuple[str, Any]]:
    """(node, output) of the outputs that the node takes."""
    links = (value for value in graph[node]["inputs"].values() if isinstance(value, list) and len(value) == 2)
    return [(source, output) for source, output in links if isinstance(source, str) and source in graph]


def _output_type(node: Mapping[str, Any], output: Any) -> str:
    kind = COMFYUI.NODE_CLASS_MAPPINGS.get(node["class_type"])
    types = () if kind is None else kind.RETURN_TYPES
    return str(types[output]) if type(output) is int and 0 <= output < len(types) else ""


def _makes(node: Mapping[str, Any], output: str) -> bool:
    kind = COMFYUI.NODE_CLASS_MAPPINGS.get(node["class_type"])
    return kind is not None and output in kind.RETURN_TYPES
