"""The prompt that is being executed, and the loader of a node's model in it."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

KINDS = {"Loader": ("MODEL",), "LoRA": ("MODEL",), "Empty": ("LATENT",)}


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture
def graph(module):
    graph = module("ui.prompt_graph")
    kinds = {name: SimpleNamespace(RETURN_TYPES=types) for name, types in KINDS.items()}
    with mock.patch.object(graph.COMFYUI, "NODE_CLASS_MAPPINGS", kinds):
        yield graph


GGUF = {
    "1": node("GGUFLoader", unet_name="a.gguf"),
    "2": node("LoRA", model=["1", 0], clip=["9", 0], strength=1.0),
    "3": node("Parallelize", model=["2", 0], gpus=0),
    "4": node("Loader", name="b.safetensors"),
    "5": node("Merge", model1=["1", 0], model2=["4", 0]),
    "6": node("Parallelize", model=["5", 0]),
    "7": node("Parallelize", model=["made by another node", 0]),
    "8": node("LoRA", model=["8", 0]),
    "9": node("Empty"),
}


@pytest.mark.parametrize(("taker", "file"), [("3", "a.gguf"), ("2", "a.gguf"), ("6", None), ("7", None), ("8", None)])
def test_the_loader_of_a_model_is_found_over_other_nodes(graph, taker, file):
    kinds = graph.COMFYUI.NODE_CLASS_MAPPINGS
    models = ("GGUFLoader", "LoRA", "Parallelize", "Merge")
    with mock.patch.dict(kinds, {name: SimpleNamespace(RETURN_TYPES=("MODEL",)) for name in models}):
        inputs = graph.loader_inputs(GGUF, taker)
    assert (inputs and inputs["unet_name"]) == file


def test_the_prompt_that_is_executed_is_looked_at(graph, monkeypatch):
    others = (1, "another", {}, {}, ["5"], {})
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([others, (2, "mine", GGUF, {}, ["5"])], []))
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    monkeypatch.setitem(sys.modules, "server", server)
    assert graph.executing() is None  # nodes are run from Python
    context = SimpleNamespace(prompt_id="mine", node_id="1")
    with mock.patch.object(graph, "get_executing_context", lambda: context):
        server.PromptServer.instance.prompt_queue = None
        assert graph.executing() is None  # nodes are run by a script with a server of its own
        server.PromptServer.instance.prompt_queue = queue
    for prompt, found in (("mine", (GGUF, "1")), ("another", ({}, "1")), ("ended", None)):
        context = SimpleNamespace(prompt_id=prompt, node_id="1")
        monkeypatch.setattr(graph, "get_executing_context", lambda context=context: context)
        assert graph.executing() == found
