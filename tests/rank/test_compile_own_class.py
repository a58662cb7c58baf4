"""Compiled blocks of a class (quickstart/mini_flux.py) compute what its blocks do, in every mode, with few graphs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_backend.acceptance import tiny_model
from parallel_backend.checkpoints.own_class import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.proven_class import call_of, proven, tensors_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands
from parallel_backend.core.compile_check import cpp_compiler
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.tried_calls import draw_weights
from parallel_backend.processes.pool import Pool
from testing.models import on_ranks
from tests.system.test_exactness import name

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOLERANCE = 1e-5


def nobody() -> None:
    pass


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_model.save(tiny_model.tiny_model(), tmp_path_factory.mktemp("own") / "tiny.safetensors")


def compiled(pool: Pool, file: Path, degrees: Degrees, own: OwnClass | None = None) -> RemoteTransformer:
    own = own or tiny_model.tried(degrees.tensor)
    checkpoint = open_own_class(file, own)
    return on_ranks(pool, checkpoint, degrees, "fp32", "sdpa", nobody, own_class=own, compile=True)


def graphs_of(model: RemoteTransformer) -> list[int]:
    return [stats.graphs for stats in model.close_run(model.open_run(), nobody)]


def whole_call() -> ModelCall:
    return tiny_model.on_ranks(*tiny_model.call())


@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(tensor=2), Degrees(ulysses=2), Degrees(ring=2)], ids=name)
def test_exact_modes(tracing_pools, file, degrees, measured):
    expected = tiny_model.reference(tiny_model.tiny_model(), *tiny_model.call())
    model = compiled(tracing_pools(degrees.world), file, degrees)
    found = []
    for _ in range(2):
        error = tiny_model.relative(model.predict(whole_call(), nobody), expected)
        measured("relative error of traced blocks", error)
        assert error <= TOLERANCE
        found.append(graphs_of(model))
    assert found[0] == found[1] and 1 <= min(found[0]) <= max(found[0]) <= 4, "of each list, first block and others"


@pytest.mark.parametrize(
    "degrees", [Degrees(pipe=2), pytest.param(Degrees(patch=2, patch_mode="displaced"), marks=pytest.mark.full)], ids=name
)
def test_bands(tracing_pools, pools, file, degrees):
    bands = 1 if degrees.displaced else 3

    def run(model: RemoteTransformer) -> torch.Tensor:
        x, _, tensors = tiny_model.call(batch=1, rows=16, columns=12)
        return sample_in_bands(model, x, linear_sigmas(4), Prompt(tensors_of(tensors), {}, 1.0), bands, warm_up=1)[0]

    expected = run(pools.load(file, degrees, own=tiny_model.tried(1)))
    model = compiled(tracing_pools(2), file, degrees)
    assert tiny_model.relative(run(model), expected) <= TOLERANCE
    graphs = graphs_of(model)
    assert all(graphs)
    assert tiny_model.relative(run(model), expected) <= TOLERANCE
    assert graphs_of(model) == graphs, "the next run makes none"


@pytest.mark.skipif(shutil.which(cpp_compiler()) is None, reason="no C++ compiler")
def test_compiled_code_is_exact(pools, tmp_path, measured):
    """A block of each class, and so few graphs, since code takes long to make."""
    arguments = json.loads(tiny_model.TINY.arguments) | {"double_blocks": 1, "single_blocks": 1}
    x, timestep, tensors = tiny_model.call()
    small = replace(tiny_model.TINY, arguments=json.dumps(arguments))
    own = proven(small, call_of(x, tensors), Degrees(), "the small model")
    draw_weights(model := build(own), 0)
    ranks = compiled(pools(1), tiny_model.save(model, tmp_path / "small.safetensors"), Degrees(), own)
    error = tiny_model.relative(ranks.predict(whole_call(), nobody), tiny_model.reference(model, x, timestep, tensors))
    measured("compiled in fp32, relative error", error)
    assert 0 < error <= TOLERANCE  # not one bit different would mean that nothing was compiled
    assert graphs_of(ranks) == [2]
    pools.forget(1)
