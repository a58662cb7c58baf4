"""Progress and previews of every way to sample, as ComfyUI's page gets them."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.comfyui.graph import NATIVE, PLAIN, Graph, copy_of_bundled
from tests.comfyui.websocket import Events

pytestmark = pytest.mark.comfyui

STEPS = 4
SIDE, LARGE = 32, 80
"""Of the latent. With the large one a step takes longer than the 0.1 s within which ComfyUI leaves further events out."""


@pytest.fixture(scope="module")
def models(base):
    with copy_of_bundled(base):
        yield


def ksampler(graph, model, latent):
    return graph.ksampler(model, latent, steps=STEPS, seed=90)


def custom(graph, model, latent):
    guider = graph.add("CFGGuider", model=model, positive=graph.text("3 1 4 1"), negative=graph.text(""), cfg=3.0)
    return graph.custom(model, guider, latent, steps=STEPS)


def pipefusion_sampler(graph, model, latent):
    settings = {"num_pipeline_patch": 3, "warmup_steps": 1, "overlap": True}
    return graph.ksampler(model, latent, "PipeFusionSampler", steps=STEPS, seed=90, **settings)


CASES = {
    "SamplerCustomAdvanced, plain": (custom, PLAIN),
    "PipeFusion Sampler": (pipefusion_sampler, PLAIN),
}


def shown(server, build, kind, side) -> tuple[list[int], list[np.ndarray]]:
    """The steps that the sampler's node has shown, and the previews, a pixel of the latent each [side, side, 3]."""
    graph = Graph()
    latent = graph.empty(8 * side)
    sampled = build(graph, graph.models()[kind], latent)
    graph.add("PreviewImage", images=graph.add("QuickstartDecode", samples=sampled))
    with Events(server.port, "progress") as events:
        prompt_id = server.queue(graph.prompt, "progress", preview_method="latent2rgb")
        seen = events.until("execution_success", prompt_id)
    steps = [
        data["value"] for event, data in seen if event == "progress" and (data["node"], data["max"]) == (sampled[0], STEPS)
    ]
    pictures = (Image.open(io.BytesIO(file)).convert("RGB").resize((side, side)) for file in events.previews)
    return steps, [np.asarray(picture).astype(int) for picture in pictures]


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_shown_with_a_preview_of_the_whole_latent(server, models, case):
    build, kind = CASES[case]
    steps, previews = shown(server, build, kind, LARGE)
    assert steps == list(range(1, STEPS + 1))
    assert len(previews) == STEPS
    _, expected = shown(server, ksampler if build is pipefusion_sampler else build, NATIVE, SIDE)
    _, previews = shown(server, build, kind, SIDE)
    first, last, native = previews[0], previews[-1], expected[-1]
    for rows in np.array_split(np.arange(SIDE), 3):  # every band of it
        assert np.abs(last[rows] - native[rows]).mean() < 0.5 * np.abs(first[rows] - native[rows]).mean()
