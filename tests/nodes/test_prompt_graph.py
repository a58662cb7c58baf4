"""Whether what a node returns is sampled in the prompt that is being executed."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

KINDS = {"Loader": ("MODEL",), "LoRA": ("MODEL",), "KSampler": ("LATENT",), "Empty": ("LATENT",), "Decode": ("IMAGE",)}


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


GRAPH = {
    "1": node("Loader", name="a.safetensors", sizes=[1, 2], points=[[1, 2], [3, 4]]),
    "2": node("LoRA", model=["1", 0], strength=1.0),
    "3": node("Empty", width=64),
    "4": node("KSampler", model=["2", 0], latent=["3", 0]),
    "5": node("Decode", samples=["4", 0]),
    "6": node("Loader", name="b.safetensors"),
    "7": node("Report", model=["6", 0]),
    "8": node("Unknown", model=["6", 0]),
}


@pytest.fixture
def graph(module):
    graph = module("ui.prompt_graph")
    kinds = {name: SimpleNamespace(RETURN_TYPES=types) for name, types in (KINDS | {"Report": ("STRING",)}).items()}
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


@pytest.mark.parametrize(
    ("loader", "outputs", "sampled"),
    [
        ("1", ["5"], True),  # over others
        ("1", ["7"], False),  # in a part that is not asked for
        ("6", ["5", "7", "8"], False),  # not sampled
        ("4", ["5"], False),  # the sampler itself
        ("made by another node", ["5"], False),
    ],
)
def test_a_node_is_sampled_if_latents_are_made_of_it(graph, loader, outputs, sampled):
    assert graph.is_sampled(GRAPH, loader, outputs) is sampled


def test_the_prompt_that_is_executed_is_looked_at(graph, monkeypatch):
    others = (1, "another", {}, {}, ["5"], {})
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([others, (2, "mine", GRAPH, {}, ["5"])], []))
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    monkeypatch.setitem(sys.modules, "server", server)
    assert not graph.feeds_a_sampler()  # nodes are run from Python
    context = SimpleNamespace(prompt_id="mine", node_id="1")
    with mock.patch.object(graph, "get_executing_context", lambda: context):
        server.PromptServer.instance.prompt_queue = None
        assert not graph.feeds_a_sampler()  # nodes are run by a script with a server of its own
        server.PromptServer.instance.prompt_queue = queue
    for prompt, sampled in (("mine", True), ("another", False), ("ended", False)):
        context = SimpleNamespace(prompt_id=prompt, node_id="1")
        monkeypatch.setattr(graph, "get_executing_context", lambda context=context: context)
        assert graph.feeds_a_sampler() is sampled
