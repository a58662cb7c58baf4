"""Compiled blocks compute what the blocks do, in every mode; graphs are few, shared by all blocks and not made again."""

import itertools
import logging
import shutil
import time
from contextlib import closing

import pytest
import torch
import torch._inductor.compile_fx
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core import compile_check as compilers
from parallel_backend.core.compile_check import check_compile, cpp_compiler
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.families.base.patching import latents_of
from parallel_backend.processes import local as launch
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.loaded_stage import LoadedStage
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import tiny
from testing.cases import all_cases
from testing.cases.case import Case
from testing.emulated_device import EmulatedCopies, EmulatedDevice
from testing.models import on_ranks
from tests.checkpoints.test_formats import make_gguf, scaled_new
from tests.support import tracing_rank
from tests.support.alone import nobody
from tests.system.test_exactness import name

TOLERANCE = 1e-5
CASES = {case.name: case for case in all_cases()}
GRAPHS = {"flux-dev": 3, "pixart-alpha": 2}
"""Of one exact call. Flux: double blocks, the first single block, and the others, whose inputs are views. PixArt: the first
block and the others, whose inputs differ in layout."""
OTHERS = [name for name in CASES if name not in GRAPHS]


class OneRank:
    """An Engine in this process, without a client. `graphs` counts what has been compiled."""

    def __init__(self, path, compile: bool, dtype: str = "fp32", resident: tuple[int, ...] = ()):
        self.checkpoint = open_checkpoint(path)
        self.family = self.checkpoint.family
        blocks = (Span(0, self.family.blocks.total(self.checkpoint.config)),)
        load = m.Load(Setup(path, dtype, ("cpu",), Degrees(), "sdpa", compile=compile), blocks, (1.0,), resident=resident)
        copies = EmulatedCopies(0, EmulatedDevice(1 << 30, 1e10)) if resident else None
        stage = LoadedStage(0, torch.device("cpu"), load, lambda fraction: None, nobody(), Heartbeat(), copies)
        self.engine = Engine(0, load, stage)
        self._seq = itertools.count(1)

    @property
    def graphs(self) -> int:
        return self.engine.stage.compiler.graphs

    def put(self, x, tensors) -> None:
        family, shapes = self.family, [tuple(latent.shape) for latent in latents_of(x)]
        grid, companion_tokens = family.patching.grid(shapes[0]), family.patching.companion_tokens(shapes)
        text = companion_tokens + family.image_padding(grid) + family.inputs.text_tokens(tensors)
        references = tensors["references"].shape[1] if "references" in tensors else 0
        self.engine.put_conditioning(
            m.PutConditioning(1, grid, references, text, shapes[0][0], tensors, companion_tokens=companion_tokens)
        )
        self.token_order = family.token_order(grid, references)

    def step(self, x, timestep, run=0, tokens=None, with_text=True) -> torch.Tensor:
        tokens = tokens or self.token_order.span
        packed = self.family.patching.pack_all(latents_of(x))
        packed, entries = tiny.rank_shard(packed, self.token_order, tokens, with_text), Span(0, len(packed))
        step = m.Step(next(self._seq), run, 1, tokens, with_text, False, True, entries, timestep, {}, (), packed)
        return self.engine.step(step, None).value

    def predict(self, x, timestep, tensors) -> torch.Tensor:
        self.put(x, tensors)
        return self.step(x, timestep)


@pytest.fixture
def traced(monkeypatch):
    """Everything but code is made. The first break in a graph is an error."""
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", tracing_rank.as_it_is)
    counters.clear()
    yield
    assert not counters["graph_break"]


@pytest.fixture
def ranks():
    """`ranks(path, compile)`: a OneRank; its graphs are dropped at the end."""
    made = []

    def make(path, compile=True, dtype="fp32", resident=()):
        made.append(OneRank(path, compile, dtype, resident))
        return made[-1]

    yield make
    for rank in made:
        rank.engine.close()


def check_family(ranks, tmp_path, case: Case, measured) -> int:
    """A compiled call equals one that is not, twice; the graphs that it took."""
    path = case.save(case.model(), tmp_path / "model.safetensors")
    inputs = case.inputs()
    expected = ranks(path, compile=False).predict(*inputs)
    compiled = ranks(path)
    for _ in range(2):
        error = tiny.relative(compiled.predict(*inputs), expected)
        measured("relative error of traced blocks", error)
        assert error <= TOLERANCE
    return compiled.graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family == "pixart-alpha" else pytest.mark.full) for family in GRAPHS]
)
def test_blocks_share_their_graphs_and_nothing_is_compiled_twice(ranks, tmp_path, traced, measured, family):
    assert check_family(ranks, tmp_path, CASES[family], measured) == GRAPHS[family]


@pytest.mark.slow
def test_streamed_blocks_share_the_graphs_too_and_keep_them_when_weights_move(ranks, tmp_path, traced):
    case = CASES["pixart-alpha"]
    path = case.save(case.model(), tmp_path / "model.safetensors")
    inputs = case.inputs()
    expected = ranks(path).predict(*inputs)
    streamed = ranks(path, resident=(1,))
    for resident in (1, 0, 1 << 20, 1):
        streamed.engine.set_resident(resident)
        if resident:
            assert torch.equal(streamed.predict(*inputs), expected)
    assert streamed.graphs == GRAPHS["pixart-alpha"]


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
def test_every_family_can_be_compiled(ranks, tmp_path, traced, measured, family):
    assert 1 <= check_family(ranks, tmp_path, CASES[family], measured) <= 3


def banded_calls(rank: OneRank, x, timestep, tensors, run: int) -> list[torch.Tensor]:
    """One exact call and two in three bands, of which the first is higher; the text runs with the first."""
    rank.engine.open_run(m.OpenRun(run, True))
    rank.put(x, tensors)
    size = len(rank.token_order.span)
    edges = (0, size // 2, size * 3 // 4, size)
    outs = [rank.step(x, timestep, run)]
    for step in (1, 2):
        for start, stop in itertools.pairwise(edges):
            outs.append(rank.step(x, timestep - 50 * step, run, Span(start, stop), with_text=start == 0))
    rank.engine.close_run(run)
    return outs


@pytest.mark.slow
def test_a_run_in_bands_compiles_once_for_each_size_and_the_next_run_nothing(ranks, flux_file, traced):
    inputs = tiny.inputs(tiny.FLUX, height=16, width=16)
    expected = banded_calls(ranks(flux_file, compile=False), *inputs, run=1)
    rank = ranks(flux_file)
    for run, graphs in ((1, 9), (2, 9)):  # whole, the high band with text, the low ones without: three graphs each
        outs = banded_calls(rank, *inputs, run=run)
        assert max(map(tiny.relative, outs, expected)) <= TOLERANCE
        assert rank.graphs == graphs
    rank.predict(*tiny.inputs(tiny.FLUX, height=12, width=16))
    assert rank.graphs == 12  # the control: another size is compiled


@pytest.mark.slow
def test_adapters_are_compiled_once_and_another_strength_is_not(ranks, flux_file, traced):
    inputs = tiny.inputs(tiny.FLUX)
    generator = torch.Generator().manual_seed(3)
    plain, compiled = ranks(flux_file, compile=False), ranks(flux_file)
    before = compiled.predict(*inputs)
    names = [f"transformer_blocks.{block}.attn.to_q.weight" for block in range(3)]
    names += [f"single_transformer_blocks.{block}.proj_mlp.weight" for block in range(5)]
    for parameter in names:
        out, into = plain.checkpoint.shape(parameter)
        up, down = torch.randn(out, 4, generator=generator), torch.randn(4, into, generator=generator)
        for rank in (plain, compiled):
            rank.engine.stage.adapters.add(m.Adapt(parameter, up, down, 0.1))
    after = compiled.predict(*inputs)
    assert tiny.relative(after, plain.predict(*inputs)) <= TOLERANCE
    assert tiny.relative(after, before) > 1e-2
    graphs = compiled.graphs
    assert graphs == 6
    for rank in (plain, compiled):
        rank.engine.stage.adapters.rescale([0.05] * len(names))
    assert tiny.relative(compiled.predict(*inputs), plain.predict(*inputs)) <= TOLERANCE
    assert tiny.relative(compiled.predict(*inputs), after) > 1e-2
    for rank in (plain, compiled):
        rank.engine.stage.adapters.drop()
    assert tiny.relative(compiled.predict(*inputs), before) <= TOLERANCE
    assert compiled.graphs == graphs


@pytest.mark.full
def test_a_whole_difference_is_added_as_factors_are(ranks, flux_file, traced):
    inputs = tiny.inputs(tiny.FLUX)
    plain, compiled = ranks(flux_file, compile=False), ranks(flux_file)
    parameter = "single_transformer_blocks.2.proj_mlp.weight"
    delta = torch.randn(plain.checkpoint.shape(parameter), generator=torch.Generator().manual_seed(4)) * 0.1
    before = compiled.predict(*inputs)
    for rank in (plain, compiled):
        rank.engine.stage.adapters.add(m.Adapt(parameter, delta, None, 1.0))
    after = compiled.predict(*inputs)
    assert tiny.relative(after, plain.predict(*inputs)) <= TOLERANCE < tiny.relative(after, before)


@pytest.mark.parametrize("packing", ["scaled fp8", pytest.param("GGUF", marks=pytest.mark.full)])
def test_packed_weights_are_expanded_outside_of_graphs(ranks, tmp_path, traced, packing):
    case = CASES["flux-dev"]
    whole = case.save(case.model(), tmp_path / "whole.safetensors")
    tensors = load_file(whole)
    if packing == "GGUF":
        path = tmp_path / "packed.gguf"
        make_gguf(path, "Q8_0", tensors)
    else:
        path = tmp_path / "packed.safetensors"
        save_file({key: value.contiguous() for key, value in scaled_new(torch.float8_e4m3fn)(tensors)[0].items()}, path)
    compiled = ranks(path)
    error = tiny.relative(compiled.predict(*case.inputs()), ranks(path, compile=False).predict(*case.inputs()))
    assert error <= TOLERANCE
    assert compiled.graphs == GRAPHS["flux-dev"]


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(ranks, flux_file, monkeypatch, caplog):
    doing = []

    def fail(_graph, _inputs):
        doing.append(rank.engine.stage.heartbeat.doing)
        raise RuntimeError("no such instruction\nand a long story")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", fail)
    inputs = tiny.inputs(tiny.FLUX)
    rank = ranks(flux_file)
    with caplog.at_level(logging.WARNING):
        out = rank.predict(*inputs)
    assert tiny.relative(out, ranks(flux_file, compile=False).predict(*inputs)) <= TOLERANCE
    assert rank.graphs == 0
    assert doing == [f"compiling ({rank.engine.stage.heartbeat.doing})"]  # and not from there on
    (said,) = [record.getMessage() for record in caplog.records if record.name == "parallel_backend.rank.stage.compile"]
    assert said.endswith("since torch.compile failed: no such instruction")


PRODUCTS = [
    Degrees(tensor=2),
    Degrees(ulysses=2),
    Degrees(ring=2),
    Degrees(tensor=3),
]
"""Degrees of three divide neither heads nor tokens: ranks' graphs differ, and their transfers have to meet all the same."""
ELSEWHERE = pytest.mark.full
"""Of two tensor ranks: three show the same, and more."""


def load(ranks: Pool, path, degrees: Degrees, compile: bool = True, dtype: str = "fp32") -> RemoteTransformer:
    return on_ranks(ranks, open_checkpoint(path), degrees, dtype, "sdpa", lambda: None, compile=compile)


def graphs_of(model: RemoteTransformer) -> list[int]:
    return [stats.graphs for stats in model.close_run(model.open_run(), lambda: None)]


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(degrees, id=name(degrees), marks=ELSEWHERE if degrees == Degrees(tensor=2) else ())
        for degrees in PRODUCTS
    ],
)
def test_modes_of_several_ranks(tracing_pools, pools, flux_file, degrees):
    inputs = tiny.inputs(tiny.FLUX, height=15, width=11)
    expected = pools.load(flux_file, degrees).predict(ModelCall(*inputs), lambda: None)
    model = load(tracing_pools(degrees.world), flux_file, degrees)
    for _ in range(2):
        assert tiny.relative(model.predict(ModelCall(*inputs), lambda: None), expected) <= TOLERANCE
        assert graphs_of(model) == [GRAPHS["flux-dev"]] * degrees.world


DEFAULT = ((Degrees(ulysses=2), "wan-2.1-t2v"),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "family"),
    [
        pytest.param(
            degrees,
            family,
            id=f"{name(degrees)}-{family}",
            marks=() if (degrees, family) in DEFAULT else pytest.mark.full,
        )
        for degrees in (Degrees(tensor=2), Degrees(ulysses=2))
        for family in ("wan-2.1-t2v", "pixart-alpha")
    ],
)
def test_modes_of_other_families(tracing_pools, pools, tmp_path, degrees, family):
    case = CASES[family]
    path = case.save(case.model(), tmp_path / "model.safetensors")
    inputs = case.inputs()
    expected = pools.load(path, degrees).predict(ModelCall(*inputs), lambda: None)
    assert (
        tiny.relative(load(tracing_pools(2), path, degrees).predict(ModelCall(*inputs), lambda: None), expected) <= TOLERANCE
    )


def flux_run(bands: int, model: RemoteTransformer) -> torch.Tensor:
    noise, _, tensors = tiny.inputs(tiny.FLUX, height=16, width=12)
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(4)
    if bands:
        return sample_in_bands(model, noise, sigmas, prompt, bands, warm_up=1)[0]
    return sample_whole(model, noise, sigmas, prompt)


@pytest.mark.parametrize(
    ("degrees", "bands"),
    [
        (Degrees(pipe=2), 3),
        pytest.param(Degrees(patch=2, patch_mode="displaced"), 1, marks=pytest.mark.full),
    ],
)
def test_runs_with_old_keys(tracing_pools, pools, flux_file, degrees, bands):
    expected = flux_run(bands, pools.load(flux_file, degrees))
    model = load(tracing_pools(2), flux_file, degrees)
    assert tiny.relative(flux_run(bands, model), expected) <= TOLERANCE
    graphs = graphs_of(model)
    assert all(graphs)
    assert tiny.relative(flux_run(bands, model), expected) <= TOLERANCE
    assert graphs_of(model) == graphs


def test_cancel_does_not_wait_for_the_compiler(flux_file, pools, monkeypatch):
    class Cancelled(Exception):
        pass

    inputs = tiny.inputs(tiny.FLUX)
    expected = pools.load(flux_file, Degrees()).predict(ModelCall(*inputs), lambda: None)
    # Of ranks to come; those of `pools` are for all tests.
    monkeypatch.setattr(launch, "rank_entry", lambda: tracing_rank.tracing_slowly)
    polls = itertools.count()

    def poll():
        if next(polls) == 2:
            raise Cancelled

    with closing(Pool(("cpu",))) as ranks:
        model = load(ranks, flux_file, Degrees())
        started = time.monotonic()
        with pytest.raises(Cancelled):
            model.predict(ModelCall(*inputs), poll)
        assert time.monotonic() - started < 2 * tracing_rank.SLOW  # three graphs take three times as long
        assert tiny.relative(model.predict(ModelCall(*inputs), lambda: None), expected) <= TOLERANCE
        assert graphs_of(model) == [3]


needs_compiler = pytest.mark.skipif(shutil.which(cpp_compiler()) is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def small_flux(tmp_path_factory):
    """A block of each class: two graphs, since code takes long to make."""
    config = tiny.FLUX | {"num_layers": 1, "num_single_layers": 1}
    return tiny.save_original(tiny.random_flux(config), config, tmp_path_factory.mktemp("small") / "small.safetensors")


@needs_compiler
def test_compiled_code_is_exact(pools, small_flux, measured):
    exact = flux_run(0, pools.load(small_flux, Degrees()))
    pools.forget(1)
    model = load(pools(1), small_flux, Degrees())
    error = tiny.relative(flux_run(0, model), exact)
    measured("compiled in fp32, relative error of a run", error)
    assert 0 < error <= TOLERANCE  # not one bit different would mean that nothing was compiled
    assert graphs_of(model) == [2]


@needs_compiler
@pytest.mark.full
def test_compiled_code_in_bf16_is_no_further_from_fp32_than_bf16_is(pools, small_flux, measured):
    exact = flux_run(0, pools.load(small_flux, Degrees()))
    rounded = flux_run(0, pools.load(small_flux, Degrees(), dtype="bf16"))
    pools.forget(1)
    compiled = flux_run(0, load(pools(1), small_flux, Degrees(), dtype="bf16"))
    ratio = tiny.relative(compiled, exact) / tiny.relative(rounded, exact)
    measured("compiled in bf16, relative error of a run over that of bf16 itself", ratio)
    assert 0 < ratio <= 1.1
    assert not torch.equal(compiled, rounded)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("family", ["pixart-alpha"])
def test_compiled_code_of_other_families(ranks, tmp_path, family, measured):
    assert check_family(ranks, tmp_path, CASES[family], measured) == GRAPHS[family]


@needs_compiler
@pytest.mark.full
def test_compiled_code_in_bands_and_on_tensor_ranks(pools, small_flux):
    for degrees, bands in ((Degrees(pipe=2), 2), (Degrees(tensor=2), 0)):
        expected = flux_run(bands, pools.load(small_flux, degrees))
        pools.forget(2)
        assert tiny.relative(flux_run(bands, load(pools(2), small_flux, degrees)), expected) <= TOLERANCE
        pools.forget(2)


@needs_compiler
def test_a_missing_compiler_is_named_with_the_widget(monkeypatch, tmp_path):
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda _which: str(tmp_path))
    with pytest.raises(ValueError, match=r"^compile: .*Python's headers.*turn compile off"):
        check_compile(("cpu", "cpu"))
    (tmp_path / "Python.h").touch()
    check_compile(("cpu", "cpu"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"^compile: .*C\+\+ compiler no-such-compiler.*turn compile off"):
        check_compile(("cpu",))


def test_on_gpus_triton_is_needed(monkeypatch):
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability[0])
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"^compile: .*package triton"):
        check_compile(("cuda:0", "cuda:1"))
    capability[0] = (6, 1)
    with pytest.raises(ValueError, match=r"^compile: .*cuda:0, which is older"):
        check_compile(("cuda:0",))
