"""A class on emulated devices gives what it gives on CPU ranks, and that is what the class gives."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.loading import load_model
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.calls.residuals import CONTROL, by_kind, for_trial
from parallel_backend.own_class.calls.tried_calls import Call, draw_weights
from parallel_backend.own_class.trials.trial import trial
from tests.campaigns.transport.cases import nobody
from tests.own_class import planted_prefix
from tests.own_class.planted_classes import WIDTH
from tests.support.cpu_and_gpu import Both
from tests.support.planted_comfyui import planted, planted_comfyui

pytestmark = [pytest.mark.threads, pytest.mark.slow]


@pytest.fixture(autouse=True)
def comfyui():
    with planted_comfyui():
        yield


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("Tokens", (Degrees(ulysses=3), Degrees(ring=2))),
        ("JoinsFeedForward", (Degrees(tensor=2, pipe=2),)),
        ("PoolsBatch", (Degrees(batch=2),)),
        pytest.param("LongSkips", (Degrees(pipe=3), Degrees(batch=2), Degrees(ulysses=2, pipe=2)), marks=pytest.mark.full),
        pytest.param("SharedKeys", (Degrees(ulysses=2, ring=2), Degrees(tensor=2)), marks=pytest.mark.full),
        pytest.param("TwoStreams", (Degrees(ulysses=3), Degrees(ulysses=2, ring=2)), marks=pytest.mark.full),
        pytest.param(
            "TablesByHead",
            (Degrees(tensor=3), Degrees(tensor=2, ulysses=2), Degrees(tensor=2, ring=2)),
            marks=pytest.mark.full,
        ),
        ("Windowed", (Degrees(ulysses=2, ring=2),)),
        ("Prefixed", (Degrees(ring=2),)),
    ],
)
def test_every_mode(both: Both, tmp_path: Path, name: str, modes: tuple[Degrees, ...]):
    own, given, path, whole = saved(name, tmp_path)
    proofs = {degree: trial(own, given, (900.0, 1.0), tensor=degree) for degree in {mode.tensor for mode in modes}}
    call = call_of(given, bool(next(iter(proofs.values())).batch))
    lists = [each for each in build(own).children() if isinstance(each, nn.ModuleList)]
    of_blocks = 4 * sum(parameter.numel() for blocks in lists for parameter in blocks.parameters())

    def on(degrees: Degrees):
        def run(_load: Callable[..., Any], pools: Callable[[int], Any]) -> list[torch.Tensor]:
            proven = replace(own, blocks=proofs[degrees.tensor].blocks)
            model = loaded(proven, path, degrees, pools(degrees.world))
            if degrees.tensor > 1 and degrees.pipe == 1:
                held = max(model.weight_bytes) - (path.stat().st_size - of_blocks)
                most = 1 / 2 if degrees.tensor == 3 else 1 / degrees.tensor  # of four heads the first rank has two
                assert held <= 1.1 * most * of_blocks, "a rank has its part of the blocks"
            return [model.predict(call, nobody)]

        return run

    for degrees in modes:
        (found,) = both.check(on(degrees))
        assert (found - whole).abs().max() <= 1e-5 * whole.abs().max(), degrees


def test_attention_by_rows_is_captured(both: Both, tmp_path: Path):
    """Numbers of rows are on the device from the call before."""
    own, given, path, whole = saved("Windowed", tmp_path)
    proof = trial(own, given, ())

    def run(_load: Callable[..., Any], pools: Callable[[int], Any]) -> list[torch.Tensor]:
        model = loaded(replace(own, blocks=proof.blocks), path, Degrees(), pools(1), cuda_graphs=True)
        call = call_of(given, bool(proof.batch))
        found = [model.predict(call, nobody) for _ in range(4)]
        graphs = model.close_run(0, nobody)[0]
        assert graphs.captured and graphs.replayed
        return found

    for found in both.on_gpu(run):
        assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("name", [pytest.param("Pooled", marks=pytest.mark.full), "AtTheEnd"])
def test_residuals_of_all_tokens_on_sequence_ranks(both: Both, tmp_path: Path, name: str):
    own, given, path, plain = saved(name, tmp_path)
    residual = torch.randn(2, 2 * 4 * 6, WIDTH, generator=torch.Generator().manual_seed(1))
    kinds = ("input", "output") if name == "AtTheEnd" else ("input",)
    residuals = {f"{kind}.{number}": residual * (number + 1) for kind in kinds for number in range(2)}
    model = build(own)
    model.load_state_dict(load_file(path), assign=True)
    with torch.no_grad():
        whole = replace(given, named=given.named | {CONTROL: by_kind(residuals)}).run(model)
    assert (whole - plain).abs().max() > 0.1 * plain.abs().max()
    proof = trial(own, replace(given, named=given.named | {CONTROL: for_trial(residuals)}), (900.0, 1.0))
    tensors = to_tensors({**given.named, CONTROL: None}, given.timestep, given.x.shape[1:])
    call = ModelCall(given.x, given.timestep, tensors, residuals=residuals)
    for degrees in (Degrees(ulysses=3), Degrees(ring=2)):

        def run(_load: Callable[..., Any], pools: Callable[[int], Any], degrees=degrees) -> list[torch.Tensor]:
            model = loaded(replace(own, blocks=proof.blocks), path, degrees, pools(degrees.world))
            return [model.predict(call, nobody)]

        (found,) = both.check(run)
        assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()


def saved(name: str, folder: Path, times: Sequence[float] = (700.0, 300.0)) -> tuple[OwnClass, Call, Path, torch.Tensor]:
    """A class, a call, a file of its weights, and what the class gives."""
    own = planted(name)
    model, g = build(own), torch.Generator().manual_seed(0)
    draw_weights(model, 7)
    save_file(dict(model.state_dict()), path := folder / "own.safetensors")
    named = {"context": torch.randn(2, 5, 16, generator=g), "scale": 3}
    given = Call(torch.randn(2, 4, 2, 4, 6, generator=g), torch.tensor(times), named)
    with torch.no_grad():
        return own, given, path, given.run(model)


def call_of(given: Call, one_batch: bool) -> ModelCall:
    tensors = to_tensors(given.named, given.timestep, given.x.shape[1:])
    return ModelCall(given.x, given.timestep, tensors, changes=BlockChanges(one_batch=one_batch))


def loaded(own: OwnClass, path: Path, degrees: Degrees, pool: Any, cuda_graphs: bool = False) -> RemoteTransformer:
    setup = Setup(path, "fp32", pool.devices, degrees, "sdpa", own_class=own, cuda_graphs=cuda_graphs)
    return load_model(pool, open_own_class(path, own), setup, nobody)


DISPLACED = Degrees(patch=2, patch_mode="displaced")


@pytest.mark.parametrize(
    ("name", "along", "modes"),
    [
        ("Tokens", "rows", (Degrees(pipe=2, ulysses=2),)),
        ("MasksKeys", "rows", (DISPLACED,)),
        pytest.param("Tokens", "frames", (Degrees(pipe=2), replace(DISPLACED, ulysses=2)), marks=pytest.mark.full),
        pytest.param("LongSkips", "rows", (Degrees(pipe=3),), marks=pytest.mark.full),
        pytest.param("OnAxes", "rows", (Degrees(pipe=2, ring=2), DISPLACED), marks=pytest.mark.full),
        pytest.param("TwoRows", "rows", (Degrees(pipe=2),), marks=pytest.mark.full),
        pytest.param("FillsUp", "rows", (Degrees(pipe=2),), marks=pytest.mark.full),
        pytest.param("WordsLayer", "rows", (Degrees(pipe=2, tensor=2),), marks=pytest.mark.full),
        pytest.param("WordsAttend", "rows", (Degrees(pipe=2, ulysses=2),), marks=pytest.mark.full),
        ("Prefixed", "rows", (Degrees(pipe=2),)),
    ],
)
def test_bands(both: Both, tmp_path: Path, name: str, along: str, modes: tuple[Degrees, ...]):
    """Keys of a call before, with the same latent, are those of this call: bands then give what the whole gives."""
    own, given, path, whole = saved(name, tmp_path, times=(700.0, 700.0))
    proof = trial(own, given, (1.0,), bands=True, tensor=modes[0].tensor)
    assert proof.bands == ""
    own = replace(own, blocks=proof.blocks, latent=proof.latent)
    call, shape = call_of(given, bool(proof.batch)), tuple(given.x.shape)

    def on(degrees: Degrees):
        def run(_load: Callable[..., Any], pools: Callable[[int], Any]) -> list[torch.Tensor]:
            model = loaded(own, path, degrees, pools(degrees.world))
            bands, found = three_calls(model, call, shape, along)
            assert (bands.exact_calls, bands.banded_calls) == (1, 2)
            # At one time nothing is extrapolated, and one set of keys is kept.
            requests = tuple(replace(each, kept=1) for each in model._memory._runs[bands.run].requests.values())
            needs = model._memory.memory_check.memory(requests)
            stats = model.close_run(bands.run, nobody)
            counted = [need.buffers for need in needs]
            held = [rank.buffer_bytes for rank in stats]
            assert held == counted, "also for a class that fills up its words, or has registers"
            return list(found)

        return run

    for degrees in modes:
        for found in both.check(on(degrees)):
            assert (found - whole).abs().max() <= 1e-5 * whole.abs().max(), degrees


def three_calls(
    model: RemoteTransformer, call: ModelCall, shape: tuple[int, ...], along: str
) -> tuple[BandedRun, torch.Tensor]:
    """A run of three calls in three bands, or in displaced patches, and what each of its calls gives."""
    patching = model.built.patching.cut(along)
    count = 1 if model.degrees.displaced else 3
    bands = BandedRun(model, cut_rows(shape, count, patching), shape, warm_up=True, along=along)

    def sample(band: int) -> torch.Tensor:
        own_call = replace(call, x=patching.rows(call.x, bands.rows[band]))
        return torch.stack([bands.predict(band, own_call, exact=False) for _ in range(3)])

    return bands, torch.cat(run_bands(bands, sample, nobody, nobody), dim=patching.band_dim)


@pytest.mark.parametrize(
    "degrees", [Degrees(), Degrees(ring=2, ulysses=2), Degrees(pipe=2, ulysses=2), Degrees(batch=2, tensor=2)], ids=str
)
def test_steady_words_run_once(both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degrees: Degrees):
    """Words, and a reference between them: later calls at other times compute the latent's tokens alone, and a row on each
    rank that stands in for words. Of two entries in two stages each is computed by itself."""
    own, given, path, _ = saved("Prefixed", tmp_path)
    reference = torch.randn(2, 4, 2, 2, 3, generator=torch.Generator().manual_seed(1))
    given = replace(given, named=given.named | {"ref_latents": [reference], "image_slots": [2]})
    proof = trial(own, given, (900.0, 1.0), bands=True, tensor=degrees.tensor)
    own = replace(own, blocks=proof.blocks, latent=proof.latent)
    model, call = build(own), call_of(given, bool(proof.batch))
    model.load_state_dict(load_file(path), assign=True)
    calls = [replace(call, x=given.x * scale, timestep=given.timestep * scale) for scale in (1.0, 0.6, 0.3)]
    counted: list[int] = []

    def run(_load: Callable[..., Any], pools: Callable[[int], Any]) -> list[torch.Tensor]:
        loaded_model, found = loaded(own, path, degrees, pools(degrees.world)), []
        for each in calls:
            counted.append(0)
            found.append(loaded_model.predict(each, nobody))
        return found

    def note(tokens: int) -> None:
        counted[-1] += tokens

    monkeypatch.setattr(planted_prefix, "note", note)
    found = both.check(run)
    image, stand_ins, blocks = 2 * 4 * 6, degrees.sequence, 4 * degrees.tensor * degrees.batch * degrees.pipe
    assert {tokens for number, tokens in enumerate(counted) if number % len(calls)} == {blocks * (image + stand_ins)}
    with torch.no_grad():
        for each, output in zip(calls, found, strict=True):
            whole = replace(given, x=each.x, timestep=each.timestep).run(model)
            assert (output - whole).abs().max() <= 1e-5 * whole.abs().max()
