"""ControlNet: what it adds behind the blocks gives diffusers' own forward with the same additions, on the ranks that have
the blocks and the tokens, and once per rank; and one ControlNet serves all bands of a run."""

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.reader import original_values
from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.client.pipefusion.banded_run import BandedRun, NotLocal, cut_rows
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.sampling import Prompt, euler, linear_sigmas
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.base.patching import Patching
from parallel_backend.families.base.step_inputs import REFERENCES
from parallel_backend.wire import messages as m
from testing import mini
from testing.cases import all_cases
from tests.support.emulated_gpu import emulated
from tests.support.fake_cuda import HOPPER

pytestmark = pytest.mark.threads

TOLERANCE = 1e-5
PATIENCE = 20.0
"""Seconds after which a run that should have ended counts as hanging."""
CASES = [case for case in all_cases() if case.name == "flux-dev"]
DIFFUSERS = {
    "flux": {
        "transformer_blocks": "controlnet_block_samples",
        "single_transformer_blocks": "controlnet_single_block_samples",
    },
}
"""Family -> block list -> the argument of diffusers' forward, a list with one tensor for each block; None: it has none, and
they are added to the image that a block gives."""
MODES = (
    Degrees(),
    Degrees(pipe=2),
    Degrees(pipe=3),
    Degrees(ulysses=2),
    Degrees(ring=2),
    Degrees(tensor=2),
    Degrees(batch=2),
    Degrees(patch=2, patch_mode="displaced"),
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name, indirect=True)


def node_module(name: str):
    """A module of nodes/ which needs nothing of ComfyUI, unlike the package that it is in."""
    package = types.ModuleType("nodes_without_comfyui")
    package.__path__ = [str(Path(__file__).parents[2] / "nodes")]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


node, model_control = node_module("sampling.band_controlnet"), node_module("model.controlnet")


def named(name: str):
    return next(case for case in CASES if case.name == name)


@pytest.fixture(scope="module")
def case(request):
    """A fixture, so that pytest runs all tests of one case before the next."""
    return request.param


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(case)`: (diffusers' model, its single file)."""

    @functools.cache
    def make(name: str):
        case = named(name)
        model = case.model()
        return model, case.save(model, tmp_path_factory.mktemp(name) / f"{name}.safetensors")

    return lambda case: make(case.name)


def blocks(case) -> list[str]:
    """Those that take residuals, in order."""
    counts = case.row.blocks.counts(case.config)
    return [f"{name}.{index}" for name in DIFFUSERS[case.family] for index in range(counts[name])]


def random_residuals(case, x: torch.Tensor, names: list[str], of_each: int = 1, seed: int = 7) -> dict[str, torch.Tensor]:
    """`of_each`: how many blocks in a row have one tensor."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(x), torch.Size(case.row.patching.grid(tuple(x.shape))).numel(), case.row.sizes.hidden(case.config))
    tensors = [torch.randn(shape, generator=generator) * 0.5 for _ in names[::of_each]]
    return {name: tensors[index // of_each] for index, name in enumerate(names)}


def reference(case, model, x, timestep, tensors, residuals) -> torch.Tensor:
    """diffusers' own forward, with zeros where there is no residual and on reference tokens."""
    size = (len(x), torch.Size(case.row.patching.grid(tuple(x.shape))).numel(), case.row.sizes.hidden(case.config))
    references = tensors[REFERENCES].shape[1] if REFERENCES in tensors else 0
    order = case.row.patching.order(case.row.patching.grid(tuple(x.shape)))
    lists, hooks, counts = {}, [], case.row.blocks.counts(case.config)
    for name, argument in DIFFUSERS[case.family].items():
        added = [residuals.get(f"{name}.{index}", torch.zeros(size)) for index in range(counts[name])]
        if argument is not None:
            lists[argument] = [torch.nn.functional.pad(tensor, (0, 0, 0, references)) for tensor in added]
            continue
        for block, tensor in zip(getattr(model, name), added, strict=True):
            tensor = tensor if order is None else tensor[:, torch.argsort(order)]
            hooks.append(block.register_forward_hook(lambda _block, _args, out, add=tensor: (out[0] + add, *out[1:])))
    with torch.inference_mode():
        out = case.reference(functools.partial(model, **lists), x, timestep, tensors)
    for hook in hooks:
        hook.remove()
    return out


def nothing() -> None:
    """A poll that has nothing to look at."""


@pytest.mark.parametrize("degrees", MODES, ids=str)
@every_case
def test_residuals_give_diffusers_forward_with_them(case, degrees, pools, made, measured):
    model, file = made(case)
    remote = pools.load(file, degrees)
    for latent in filter(None, (case.latent, case.odd)):
        given = case.inputs(latent=latent)
        residuals = random_residuals(case, given[0], blocks(case))
        expected = reference(case, model, *given, residuals)
        error = mini.relative(remote.predict(ModelCall(*given, residuals=residuals), nothing), expected)
        measured(f"relative error with residuals, {case.name}", error)
        assert error <= TOLERANCE
        assert mini.relative(remote.predict(ModelCall(*given), nothing), expected) > 0.05  # the control: they do something


@every_case
def test_each_blocks_residual_is_added_once_whatever_the_stage(case, pools, made):
    """At a border it is the sending stage that adds it: none twice, none never."""
    model, file = made(case)
    given = case.inputs()
    remote = pools.load(file, Degrees(pipe=3))
    plain = remote.predict(ModelCall(*given), nothing)
    for name, residual in random_residuals(case, given[0], blocks(case)).items():
        found = remote.predict(ModelCall(*given, residuals={name: residual}), nothing)
        assert mini.relative(found, reference(case, model, *given, {name: residual})) <= TOLERANCE, name
        assert mini.relative(found, plain) > 1e-3, name


class Steps:
    """The Step messages that a model sends, by rank."""

    def __init__(self, monkeypatch, remote):
        self.by_rank: dict[int, list[m.Step]] = {}
        send = remote.pool.send

        def note(rank, message, *rest):
            if isinstance(message, m.Step):
                self.by_rank.setdefault(rank, []).append(message)
            send(rank, message, *rest)

        monkeypatch.setattr(remote.pool, "send", note)

    def bytes(self) -> int:
        """Of residuals, on their way to all ranks."""
        return sum(tensor.nbytes for steps in self.by_rank.values() for step in steps for tensor in step.added)


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=3), Degrees(ulysses=2), Degrees(batch=2)], ids=str)
def test_a_tensor_of_several_blocks_is_sent_once_and_to_its_stages_only(degrees, pools, made, monkeypatch):
    case = named("flux-dev")
    model, file = made(case)
    given = case.inputs()
    remote = pools.load(file, degrees)
    residuals = random_residuals(case, given[0], blocks(case), of_each=2)  # blocks 0 and 1, 2 and 3
    one = next(iter(residuals.values())).nbytes
    apart = {name: tensor.clone() for name, tensor in residuals.items()}
    found = {}
    for given_as, added in {"once": residuals, "apart": apart}.items():
        with monkeypatch.context() as patched:
            steps = Steps(patched, remote)
            output = remote.predict(ModelCall(*given, residuals=added), nothing)
            assert mini.relative(output, reference(case, model, *given, residuals)) <= TOLERANCE
        found[given_as] = steps.bytes()
        for rank, sent in steps.by_rank.items():
            stage = degrees.coordinate(rank).pipe
            owned = case.row.blocks.owned(open_checkpoint(file).config, remote.balance.stage_blocks[stage])
            for step in sent:
                assert set(step.residuals) == {f"{name}.{index}" for name, range_ in owned.items() for index in range_}
    assert found["apart"] == len(residuals) * one
    borders = sum(span.start % 2 for span in remote.balance.stage_blocks)  # a pair on two stages goes to both
    assert found["once"] == (len(residuals) / 2 + borders) * one


def test_without_a_controlnet_nothing_is_sent(pools, made, monkeypatch):
    case = named("flux-dev")
    remote = pools.load(made(case)[1], Degrees(pipe=2))
    steps = Steps(monkeypatch, remote)
    remote.predict(ModelCall(*case.inputs()), nothing)
    assert len(steps.by_rank) == 2
    assert steps.bytes() == 0
    assert not any(step.residuals for sent in steps.by_rank.values() for step in sent)


def in_bands(remote, case, x, sigmas, tensors, residuals, exact_steps) -> torch.Tensor:
    """As client/sampling.py does it, with the same residuals at each step."""
    patching = case.row.patching
    rows = cut_rows(tuple(x.shape), case.bands, patching)
    run = BandedRun(remote, rows, tuple(x.shape), warm_up=True)

    def sample(band: int) -> torch.Tensor:
        row = patching.row_tokens(patching.grid(tuple(x.shape)))
        tokens = slice(rows[band].start // patching.side * row, -(-rows[band].stop // patching.side) * row)
        own = {id(tensor): tensor[:, tokens] for tensor in residuals.values()}
        added = {name: own[id(tensor)] for name, tensor in residuals.items()}

        def predict(x, timestep, tensors):
            exact = bool(timestep[0] > sigmas[exact_steps])
            return run.predict(band, ModelCall(x, timestep * scale_of(case), tensors, residuals=added), exact)

        return euler(predict, patching.rows(x, rows[band]), sigmas, Prompt(tensors, {}, 1.0))

    parts = run_bands(run, sample, nothing, nothing)
    remote.close_run(run.run, nothing)
    assert (run.exact_calls, run.banded_calls) == (exact_steps, len(sigmas) - 1 - exact_steps)
    return torch.cat(parts, patching.band_dim)


def scale_of(case) -> float:
    """Of the model's timesteps; sigmas are 0 ... 1 in every family here."""
    return case.timestep / 0.7


def sampling(case, latent, steps: int):
    """(x, sigmas, tensors, residuals)"""
    x, _, tensors = case.inputs(latent=latent)
    return x, linear_sigmas(steps), tensors, random_residuals(case, x, blocks(case), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "degrees"),
    [
        ("odd", Degrees(pipe=2)),
        ("whole", Degrees(ulysses=2)),
        pytest.param("whole", Degrees(pipe=2), marks=pytest.mark.full),
        pytest.param("odd", Degrees(ulysses=2), marks=pytest.mark.full),
    ],
    ids=str,
)
@every_case
def test_pipefusion_that_only_warms_up_equals_diffusers(case, size, degrees, pools, made, measured):
    model, file = made(case)
    x, sigmas, tensors, residuals = sampling(case, case.latent if size == "whole" else case.odd, 2)

    def whole(added, x, timestep, tensors):
        return reference(case, model, x, timestep * scale_of(case), tensors, added)

    prompt = Prompt(tensors, {}, 1.0)
    expected, without = (euler(functools.partial(whole, added), x, sigmas, prompt) for added in (residuals, {}))
    error = mini.relative(in_bands(pools.load(file, degrees), case, x, sigmas, tensors, residuals, 2), expected)
    measured(f"relative error of PipeFusion's warm-up with residuals, {case.name}", error)
    assert error <= TOLERANCE
    assert mini.relative(without, expected) > 0.02


@every_case
def test_bands_with_old_keys_depend_on_the_schedule_alone(case, pools, made):
    _, file = made(case)
    x, sigmas, tensors, residuals = sampling(case, case.odd, 4)
    alone, piped = (
        in_bands(pools.load(file, degrees), case, x, sigmas, tensors, residuals, 1)
        for degrees in (Degrees(), Degrees(pipe=2))
    )
    error = mini.relative(piped, alone)
    assert error <= TOLERANCE
    exact, without = (in_bands(pools.load(file, Degrees()), case, x, sigmas, tensors, r, 4) for r in (residuals, {}))
    assert max(TOLERANCE, 10 * error) < mini.relative(alone, exact) < mini.relative(without, exact)


# What ComfyUI's `get_control` gives -> residuals.


def outputs(case, shape, count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = shape[0], torch.Size(case.row.patching.grid(shape)).numel(), case.row.sizes.hidden(case.config)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def test_outputs_belong_to_the_blocks_of_their_number():
    case, shape = named("flux-dev"), (2, 16, 16, 12)
    assert case.row.blocks.residuals == {"input": "transformer_blocks", "output": "single_transformer_blocks"}
    a, b, c = outputs(case, shape, 3)
    control = {"input": [a, None, a, c], "middle": [None], "output": [None, b]}  # one more than there are double blocks
    found = model_control.residuals(case.row, case.config, control, shape)
    assert {name: id(tensor) for name, tensor in found.items()} == {
        "transformer_blocks.0": id(a),
        "transformer_blocks.2": id(a),
        "single_transformer_blocks.1": id(b),
    }
    for empty in (None, {}, {"input": [], "middle": [], "output": []}):
        assert model_control.residuals(case.row, case.config, empty, shape) == {}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("flux", "middle"), ("wan", "output")],
)
def test_outputs_that_the_family_takes_none_of_are_refused_by_name(family, kind):
    case = next(case for case in all_cases() if case.family == family)
    shape = (1, *case.latent)
    with pytest.raises(ValueError, match=rf"^control_net: .* it has '{kind}' outputs, which {family} takes none of"):
        model_control.residuals(case.row, case.config, {kind: outputs(case, shape, 1)}, shape)


@pytest.mark.parametrize(
    "change", [lambda t: t[:1], lambda t: t[:, 1:], lambda t: t[..., 1:], lambda t: t.unflatten(1, (8, 6))]
)
def test_outputs_for_another_model_are_refused_before_they_reach_a_rank(change):
    case, shape = named("flux-dev"), (2, 16, 16, 12)
    with pytest.raises(ValueError, match=r"^control_net: .* where the model's blocks have \[2, 48, 128\]"):
        model_control.residuals(case.row, case.config, {"input": [change(outputs(case, shape, 1)[0])]}, shape)


# One ControlNet for all bands.


@dataclass
class FakeControlNet:
    """Answers with the tokens of what it saw, number of call in front, as a native model with `patching` would have them."""

    patching: Patching
    during: Callable[[int], None] = lambda turn: None

    def __post_init__(self):
        self.seen: list[torch.Tensor] = []

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        self.seen.append(x_noisy)
        self.during(len(self.seen) - 1)
        if len(self.seen) == 3:
            return None
        tokens = self.patching.pack(x_noisy)
        order = self.patching.order(self.patching.grid(tuple(x_noisy.shape)))
        tokens = tokens if order is None else tokens[:, torch.argsort(order)]
        return {"input": [tokens, None, tokens, tokens + 1], "middle": [], "output": [tokens + 1]}


BANDS, TURNS = 3, 5


def run_control(shared, shape, sample=None) -> list:
    """What each band got, by turn; or the error that it ended with."""
    results: list = [None] * BANDS

    def default(band: int) -> list:
        return [ask(shared, band, latent_of(shape, band, turn), 1.0 - turn / 10) for turn in range(TURNS)]

    def work(band: int) -> None:
        try:
            results[band] = (sample or default)(band)
            shared.finish(band)
        except BaseException as error:
            shared.close(error)
            results[band] = error

    threads = [threading.Thread(target=work, args=(band,), daemon=True) for band in range(BANDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a band hangs"
    return results


def ask(shared, band: int, x: torch.Tensor, sigma: float, call: str = "positive"):
    return shared.band(band).get_control(x, torch.tensor([sigma]), {}, 1, {"uuids": [call]})


def latent_of(shape, band: int, turn: int) -> torch.Tensor:
    """A band's rows, of values that say which band's and which turn's they are."""
    rows = cut_rows(shape, BANDS, PATCHINGS[len(shape)])[band]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(turn))
    return whole[..., rows.slice, :]


PATCHINGS = {4: Patching(), 5: Patching(video=True)}
SHAPES = [(1, 4, 12, 6), (2, 4, 11, 5), (1, 4, 3, 12, 6)]


def shared_control(shape, exact_above, during=lambda turn: None, extrapolate=False, device=torch.device("cpu")):  # noqa: B008
    patching = PATCHINGS[len(shape)]
    net = FakeControlNet(patching, during)
    cut = BandCut(patching, cut_rows(shape, BANDS, patching), (shape,))
    return net, node.BandedControl(net, cut, exact_above, extrapolate, device)


@pytest.mark.parametrize("exact_above", [0.85, -1.0, float("inf")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_sees_band_0_as_it_is_and_the_others_as_they_were(shape, exact_above):
    net, shared = shared_control(shape, exact_above)
    got = run_control(shared, shape)
    patching = PATCHINGS[len(shape)]
    for turn, seen in enumerate(net.seen):
        exact = turn == 0 or 1.0 - turn / 10 > exact_above
        others = turn if exact else turn - 1
        expected = [latent_of(shape, band, turn if band == 0 else others) for band in range(BANDS)]
        assert torch.equal(seen, torch.cat(expected, -2))
        if turn == 2:
            assert all(answers[turn] is None for answers in got)
            continue
        # Side by side, the bands' parts in the stream's order are the whole in that order.
        parts = []
        for band in range(BANDS):
            answer = got[band][turn]["input"]
            assert answer[0] is answer[2] and answer[1] is None and torch.equal(answer[3], got[band][turn]["output"][0])
            order = patching.order(patching.grid(tuple(latent_of(shape, band, 0).shape)))
            parts.append(answer[0] if order is None else answer[0][:, order])
        assert torch.equal(torch.cat(parts, 1), patching.pack(seen))
    assert len(net.seen) == TURNS


def test_on_a_device_it_is_given_all_there_and_its_answer_is_on_the_host():
    """Bands are sampled on the host, a ControlNet is where ComfyUI has it. One copy of each output, none of what repeats."""
    shape = SHAPES[1]
    expected = run_control(shared_control(shape, 0.85)[1], shape)
    with emulated(HOPPER) as gpus:
        net, shared = shared_control(shape, 0.85, device=torch.device("cuda:0"))
        gpus.record.stops.clear()
        got, stops = run_control(shared, shape), list(gpus.record.stops)
    assert {seen.device.type for seen in net.seen} == {"cuda"}
    for mine, others in zip(expected, got, strict=True):
        for one, other in zip(mine, others, strict=True):
            assert (one is None) == (other is None)
            pairs = zip(one["input"] + one["output"], other["input"] + other["output"], strict=True) if one else ()
            assert all(a is b or torch.equal(a, b) for a, b in pairs)
    assert got[0][0]["input"][0] is got[0][0]["input"][2]
    answers = TURNS - 1  # the third call has none
    assert len(stops) == answers, stops  # one wait for all copies of an answer


TIMES = {"euler": (1.0, 0.8, 0.7, 0.5, 0.3), "heun": (1.0, 0.8, 0.8, 0.7, 0.7, 0.5, 0.5)}


@pytest.mark.parametrize("extrapolate", [True, False])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_sees_the_others_moved_on_to_the_present_time(shape, times, extrapolate):
    """Latents on a straight line: but in the second step, when there is no line yet, they are seen as they are now."""
    start, way = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    net, shared = shared_control(shape, float("inf"), extrapolate=extrapolate)
    rows = cut_rows(shape, BANDS, PATCHINGS[len(shape)])

    def sample(band):
        for time in times:
            ask(shared, band, (start + way * time)[..., rows[band].slice, :], time)

    assert run_control(shared, shape, sample) == [None] * BANDS
    for turn, (seen, time) in enumerate(zip(net.seen, times, strict=True)):
        now = start + way * time
        assert torch.equal(seen[..., rows[0].slice, :], now[..., rows[0].slice, :])
        known = turn == 0 or times[turn - 1] == time or (extrapolate and times[turn - 1] != 1.0)
        assert torch.allclose(seen, now, atol=1e-5) == known, turn


def test_each_conditionings_calls_are_counted_apart():
    shape = SHAPES[0]
    net, shared = shared_control(shape, float("inf"))
    calls = [(turn, call) for turn in range(3) for call in ("negative", "positive")] + [(3, "a later one")]

    def sample(band):
        for turn, call in calls:
            ask(shared, band, latent_of(shape, band, turn), 0.5, call)

    assert run_control(shared, shape, sample) == [None] * BANDS
    for seen, (turn, call) in zip(net.seen, calls, strict=True):
        others = turn if call == "a later one" else max(turn - 1, 0)  # a first call is of this step in all bands
        expected = [latent_of(shape, band, turn if band == 0 else others) for band in range(BANDS)]
        assert torch.equal(seen, torch.cat(expected, -2)), (turn, call)


@pytest.mark.parametrize("turn", [0, 1, 3])
@pytest.mark.parametrize("exact_above", [-1.0, float("inf")])
def test_an_error_inside_reaches_every_band(turn, exact_above):
    def fail(now):
        if now == turn:
            raise KeyError("the ControlNet's own")

    _, shared = shared_control(SHAPES[0], exact_above, fail)
    assert [type(result) for result in run_control(shared, SHAPES[0])] == [KeyError] * BANDS


@pytest.mark.parametrize("band", range(BANDS))
@pytest.mark.parametrize("exact_above", [-1.0, float("inf")])
def test_a_band_that_fails_elsewhere_leaves_none_waiting(band, exact_above):
    _, shared = shared_control(SHAPES[0], exact_above)

    def sample(me):
        for turn in range(TURNS):
            if (me, turn) == (band, 2):
                raise KeyError("the sampler's own")
            ask(shared, me, latent_of(SHAPES[0], me, turn), 0.5)

    results = run_control(shared, SHAPES[0], sample)
    assert isinstance(results[band], KeyError)
    assert all(result is None or isinstance(result, KeyError) for result in results)
    assert isinstance(results[0], KeyError)  # it waits for all others


@pytest.mark.parametrize("short", range(BANDS))
def test_bands_that_make_different_numbers_of_calls_are_not_local(short):
    _, shared = shared_control(SHAPES[0], -1.0)

    def sample(me):
        for turn in range(2 if me == short else 4):
            ask(shared, me, latent_of(SHAPES[0], me, turn), 0.5)

    assert any(isinstance(result, NotLocal) for result in run_control(shared, SHAPES[0], sample))


def test_nobody_is_held_up_while_it_computes():
    """Other bands take earlier answers, and may end the run, while the ControlNet is at work."""
    ended = []

    def during(turn):
        if turn == 1:
            thread = threading.Thread(target=shared.close, args=(KeyError("cancelled"),), daemon=True)
            thread.start()
            thread.join(PATIENCE / 4)
            ended.append(not thread.is_alive())

    _, shared = shared_control(SHAPES[0], float("inf"), during)
    assert [type(result) for result in run_control(shared, SHAPES[0])] == [KeyError] * BANDS
    assert ended == [True]


def test_controlnets_that_copy_layers_of_the_model_find_them_under_their_native_names(tmp_path):
    """Some take the first layer; the others here are cut, fused or swapped in diffusers' layout."""
    case = next(case for case in all_cases() if case.name == "flux-dev")
    model = case.model()
    expected = load_file(file := case.save(model, tmp_path / "model.safetensors"))
    model.save_pretrained(folder := tmp_path / "folder")
    for prefix in ("img_in.", "double_blocks.1.img_attn.", "final_layer."):
        wanted = {key.removeprefix(prefix): value for key, value in expected.items() if key.startswith(prefix)}
        for path in (file, folder):
            found = original_values(open_checkpoint(path), prefix)
            assert found.keys() == wanted.keys() and len(found) > 1
            assert all(torch.equal(found[key], wanted[key]) for key in found)
