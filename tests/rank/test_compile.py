"""Compiled blocks compute what the blocks do, in every mode; graphs are few, shared by all blocks and not made again."""

import itertools
import logging
import shutil
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch._inductor.compile_fx
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes import local as launch
from parallel_backend.processes.pool import Pool
from parallel_backend.wire import messages as m
from testing import mini
from testing.emulated_device import EmulatedCopies, EmulatedDevice
from testing.models import Cancelled, on_ranks
from tests.checkpoints.test_formats import scaled_new
from tests.support import tracing_rank
from tests.support.one_rank import OneRank

TOLERANCE = 1e-5
GRAPHS = 9
"""Of one exact call: of the blocks' code between their calls of attention."""


@pytest.fixture
def traced(monkeypatch):
    """Everything but code is made. A break in a graph is an error, but for a module that is to run between two."""
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", tracing_rank.as_it_is)
    counters.clear()
    yield
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


@pytest.fixture
def ranks():
    """`ranks(path, compile)`: a OneRank; its graphs are dropped at the end."""
    made = []

    def make(path, compile=True, resident=()):
        copies = EmulatedCopies(0, EmulatedDevice(1 << 30, 1e10)) if resident else None
        made.append(OneRank(path, resident=resident, compile=compile, copies=copies))
        return made[-1]

    yield make
    for rank in made:
        rank.engine.close()


@pytest.mark.slow
def test_streamed_blocks_share_the_graphs_and_keep_them_when_weights_move(ranks, mini_file, traced):
    inputs = mini.inputs()
    expected = ranks(mini_file).predict(*inputs)
    streamed = ranks(mini_file, resident=(1,))
    for resident in (1, 0, 1 << 20, 1):
        streamed.engine.set_resident(resident)
        if resident:
            assert torch.equal(streamed.predict(*inputs), expected)
            assert streamed.stage.compiler.graphs == GRAPHS


@pytest.mark.slow
def test_adapters_are_compiled_once_and_another_strength_is_not(ranks, mini_file, traced):
    inputs = mini.inputs()
    generator = torch.Generator().manual_seed(3)
    plain, compiled = ranks(mini_file, compile=False), ranks(mini_file)
    before = compiled.predict(*inputs)
    assert compiled.stage.compiler.graphs == GRAPHS
    names = [f"double_blocks.{block}.img_attn.proj.weight" for block in range(3)]
    names += [f"single_blocks.{block}.linear1.weight" for block in range(5)]
    parts = []
    for parameter in names:
        out, into = plain.checkpoint.shape(parameter)
        up, down = torch.randn(out, 4, generator=generator), torch.randn(4, into, generator=generator)
        parts.append(m.Adapt(parameter, up, down, 0.1))
        for rank in (plain, compiled):
            rank.engine.stage.adapters.add(parts[-1])
    after = compiled.predict(*inputs)
    assert mini.relative(after, plain.predict(*inputs)) <= TOLERANCE
    assert mini.relative(after, before) > 1e-2
    graphs = compiled.stage.compiler.graphs
    assert GRAPHS < graphs <= 2 * GRAPHS
    for rank in (plain, compiled):
        rank.engine.stage.adapters.drop()
        for part in parts:
            rank.engine.stage.adapters.add(replace(part, scale=0.05))
    assert mini.relative(compiled.predict(*inputs), plain.predict(*inputs)) <= TOLERANCE
    assert mini.relative(compiled.predict(*inputs), after) > 1e-2
    for rank in (plain, compiled):
        rank.engine.stage.adapters.drop()
    assert mini.relative(compiled.predict(*inputs), before) <= TOLERANCE
    assert compiled.stage.compiler.graphs == graphs


def test_packed_weights_are_expanded_outside_of_graphs(ranks, mini_file, tmp_path, traced):
    inputs, path = mini.inputs(), tmp_path / "packed.safetensors"
    packed = scaled_new(torch.float8_e4m3fn)(load_file(mini_file))[0]
    save_file({key: value.contiguous() for key, value in packed.items()}, path)
    compiled = ranks(path)
    error = mini.relative(compiled.predict(*inputs), ranks(path, compile=False).predict(*inputs))
    assert error <= TOLERANCE
    assert compiled.stage.compiler.graphs  # of what is between them


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(ranks, mini_file, monkeypatch, caplog):
    doing = []

    def fail(_graph, _inputs):
        doing.append(rank.engine.stage.heartbeat.doing)
        raise RuntimeError("no such instruction\nand a long story")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", fail)
    inputs = mini.inputs()
    rank = ranks(mini_file)
    with caplog.at_level(logging.WARNING):
        out = rank.predict(*inputs)
    assert mini.relative(out, ranks(mini_file, compile=False).predict(*inputs)) <= TOLERANCE
    assert rank.stage.compiler.graphs == 0
    assert doing == [f"compiling ({rank.engine.stage.heartbeat.doing})"]  # and not from there on
    (said,) = [record.getMessage() for record in caplog.records if record.name == "parallel_backend.rank.stage.compile"]
    assert said.endswith("because torch.compile failed: no such instruction")


def load(ranks: Pool, path, degrees: Degrees, compile: bool = True, dtype: str = "fp32") -> RemoteTransformer:
    return on_ranks(ranks, mini.opened(path), degrees, dtype, "sdpa", lambda: None, compile=compile)


def graphs_of(model: RemoteTransformer) -> list[int]:
    return [stats.graphs for stats in model.close_run(model.open_run(), lambda: None)]


@pytest.mark.parametrize("degrees", [pytest.param(Degrees(ring=2), marks=pytest.mark.full), Degrees(tensor=3)], ids=str)
def test_a_mode_of_several_ranks(tracing_pools, pools, mini_file, degrees):
    """Three tensor ranks divide neither heads nor tokens: their graphs differ, and their transfers still meet."""
    inputs = mini.inputs(height=15, width=11)
    expected = pools.mini(mini_file, degrees).predict(ModelCall(*inputs), lambda: None)
    model = load(tracing_pools(degrees.world), mini_file, degrees)
    made = []
    for _ in range(2):
        assert mini.relative(model.predict(ModelCall(*inputs), lambda: None), expected) <= TOLERANCE
        made.append(graphs_of(model))
    assert made[0] == made[1] and min(made[0]) >= GRAPHS


def run_of(bands: int, model: RemoteTransformer) -> torch.Tensor:
    noise, _, tensors = mini.inputs(height=16, width=12)
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(4)
    if bands:
        return sample_in_bands(model, noise, sigmas, prompt, bands, warm_up=1)[0]
    return sample_whole(model, noise, sigmas, prompt)


def test_bands_with_old_keys(tracing_pools, pools, mini_file):
    degrees = Degrees(pipe=2)
    expected = run_of(3, pools.mini(mini_file, degrees))
    model = load(tracing_pools(2), mini_file, degrees)
    assert mini.relative(run_of(3, model), expected) <= TOLERANCE
    graphs = graphs_of(model)
    assert all(graphs)
    assert mini.relative(run_of(3, model), expected) <= TOLERANCE
    assert graphs_of(model) == graphs


def test_cancel_does_not_wait_for_the_compiler(mini_file, pools, monkeypatch):
    inputs = mini.inputs()
    expected = pools.mini(mini_file, Degrees()).predict(ModelCall(*inputs), lambda: None)
    # Of ranks to come; those of `pools` are for all tests.
    monkeypatch.setattr(launch, "rank_entry", lambda: tracing_rank.tracing_slowly)
    polls = itertools.count()

    def poll():
        if next(polls) == 2:
            raise Cancelled

    with closing(Pool(("cpu",))) as ranks:
        model = load(ranks, mini_file, Degrees())
        started = time.monotonic()
        with pytest.raises(Cancelled):
            model.predict(ModelCall(*inputs), poll)
        assert time.monotonic() - started < 2 * tracing_rank.SLOW  # all graphs take several times as long
        assert mini.relative(model.predict(ModelCall(*inputs), lambda: None), expected) <= TOLERANCE
        assert graphs_of(model) == [GRAPHS]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    """A block of each class, since code takes long to make."""
    config = mini.CONFIG | {"double_blocks": 1, "single_blocks": 1}
    return mini.save(mini.random_model(config), tmp_path_factory.mktemp("small") / "small.safetensors")


@needs_compiler
def test_compiled_code_is_exact(pools, small_file):
    exact = run_of(0, pools.mini(small_file, Degrees()))
    pools.forget(1)
    model = load(pools(1), small_file, Degrees())
    error = mini.relative(run_of(0, model), exact)
    assert 0 < error <= TOLERANCE  # not one bit different would mean that nothing was compiled
    assert graphs_of(model) == [GRAPHS]
