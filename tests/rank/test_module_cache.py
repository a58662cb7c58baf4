"""What a rank computes once for many micro-steps: found by trial for every family, and as good as computed anew."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span, split
from parallel_backend.families.base.family import CacheScope, name_pattern
from parallel_backend.families.base.patching import latents_of
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.loaded_stage import LoadedStage
from parallel_backend.rank.stage.module_cache import CachedModule, ModuleCache
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import tiny
from testing.cases import all_cases
from tests.support.alone import nobody
from tests.support.case_params import of_each_form

CASES = all_cases()
BANDS = 2
BIG = 64
"""Values of the largest weight from which on a module counts in these tiny models."""


class Runs:
    """One family's whole model in this process, and micro-steps for it."""

    def __init__(self, case, path):
        checkpoint = open_checkpoint(path)
        self.family = family = checkpoint.family
        blocks = (Span(0, family.total),)
        load = m.Load(Setup(path, "fp32", ("cpu",), Degrees(), "auto"), blocks, (1.0,))
        stage = LoadedStage(0, torch.device("cpu"), load, lambda fraction: None, nobody(), Heartbeat())
        self.engine = Engine(0, load, stage)
        self.x, self.timestep, tensors = case.inputs()
        self.shapes = [tuple(latent.shape) for latent in latents_of(self.x)]
        grid, companion_tokens = family.patching.grid(self.shapes[0]), family.patching.companion_tokens(self.shapes)
        self.token_order = family.token_order(grid)
        text_tokens = companion_tokens + family.words(tensors)
        for conditioning in (1, 2):
            given = {name: t * conditioning if name == "context" else t for name, t in tensors.items()}
            references, batch = self.token_order.references, self.shapes[0][0]
            self.engine.put_conditioning(
                m.PutConditioning(
                    conditioning, grid, references, text_tokens, batch, given, companion_tokens=companion_tokens
                )
            )
        rows = -(-self.shapes[0][family.patching.band_dim] // family.patching.band_size)
        self.bands = [self.token_order.of_rows(span) for span in split(Span(0, rows), BANDS)]

    def call(self, number: int, spans: list[Span], conditioning: int = 1) -> Iterator[torch.Tensor]:
        """Micro-steps of one call, at a timestep and with a latent of its own."""
        tokens = self.family.patching.pack_all(tuple(latent * (1 + number / 7) for latent in latents_of(self.x)))
        for index, span in enumerate(spans):
            x = tiny.rank_shard(tokens, self.token_order, span, index == 0)
            step = m.Step(
                number * 10 + index, 1, conditioning, span, index == 0, False, True, Span(0, len(x)),
                self.timestep * (1 - number / 10), {}, (), x,
            )  # fmt: skip
            yield self.engine.step(step, None).value

    @contextmanager
    def run(self):
        self.engine.open_run(m.OpenRun(1, True))
        yield
        self.engine.close_run(1)

    def everything(self, prompts: tuple[int, ...] = (1, 2)) -> list[torch.Tensor]:
        with self.run():
            outputs = list(self.call(0, [self.token_order.span]))
            for number in (1, 2):
                for conditioning in prompts:
                    outputs += self.call(number, self.bands, conditioning)
        return outputs


QUICK = ("wan-animate-2", "qwen-image-2.1")
"""Families of the quick tier: kept by the call, the prompt and the band; in blocks and outside of them; a
video."""


@pytest.fixture(scope="module", params=of_each_form(CASES, quick=QUICK))
def runs(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param.name) / "model.safetensors"
    return Runs(request.param, request.param.save(request.param.model(), path))


def tensors_of(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [t for part in output for t in tensors_of(part)] if isinstance(output, (tuple, list)) else []


def same(a, b) -> bool:
    a, b = tensors_of(a), tensors_of(b)
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def outputs_by_module(runs: Runs) -> dict[str, dict[tuple[int, int], list]]:
    """Module -> (call, band) -> what it gave there, nothing being kept."""
    found, at, handles = defaultdict(lambda: defaultdict(list)), None, []
    for name, module in runs.engine.stage.model.named_modules():
        hook = lambda _module, _args, out, name=name: found[name][at].append(out)  # noqa: E731
        handles.append(module.register_forward_hook(hook))
    with runs.run():
        list(runs.call(0, [runs.token_order.span]))
        for number in (1, 2):
            calls = runs.call(number, runs.bands)
            for band in range(BANDS):
                at = number, band
                next(calls)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture
def nothing_kept(runs, monkeypatch):
    monkeypatch.setattr(runs.engine.stage.module_cache, "begin_step", lambda step, whole: None)


def test_they_are_just_those_that_give_the_same_in_every_band(runs, nothing_kept):
    """What is kept may be, and nothing large that could be kept is left out."""
    plan = {re.compile(name_pattern(name)): per for name, per in runs.family.forward.cached_modules.items()}
    model, planned = runs.engine.stage.model, {}
    for name, module in model.named_modules():
        per = next((per for pattern, per in plan.items() if pattern.fullmatch(name)), None)
        assert isinstance(module, CachedModule) == (per is not None), name
        if per is not None:
            planned[name] = per
    left_out = []
    for name, outputs in outputs_by_module(runs).items():
        runs_of = [outputs[number, band] for number in (1, 2) for band in range(BANDS)]
        first, second, later, _ = runs_of
        if name in planned:
            first, second, later = (outputs or first for outputs in (first, second, later))  # not called without text
            alike = {CacheScope.CALL: (first, second), CacheScope.PROMPT: (first, later), CacheScope.BAND: (first, later)}[
                planned[name]
            ]
            assert same(*alike) and (planned[name] is not CacheScope.PROMPT or same(first, second)), name
        elif name and same(first, second) and any(t.numel() for t in tensors_of(first)):
            inside = any(name.startswith(f"{other}.") for other in planned)
            weights = max((p.numel() for p in model.get_submodule(name).parameters()), default=0)
            if not inside and weights >= BIG:
                left_out.append(name)
    assert not left_out
    assert planned


def test_kept_is_as_good_as_computed_anew_bit_for_bit(runs, monkeypatch):
    kept = runs.everything()
    with monkeypatch.context() as patch:
        patch.setattr(runs.engine.stage.module_cache, "begin_step", lambda step, whole: None)
        anew = runs.everything()
    again = runs.everything()
    for a, b, c in zip(kept, anew, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_each_is_computed_once(runs, monkeypatch):
    """Per call in bands, per prompt of a run, per band of a run, as the plan says."""
    counts, once = defaultdict(int), runs.engine.stage.module_cache
    plan = {re.compile(name_pattern(name)): per for name, per in runs.family.forward.cached_modules.items()}
    handles = []
    for name, module in runs.engine.stage.model.named_modules():
        if isinstance(module, CachedModule):
            count = lambda *_args, name=name: counts.update({name: counts[name] + 1})  # noqa: E731
            handles.append(module.register_forward_hook(count))
    with runs.run():
        list(runs.call(0, [runs.token_order.span]))
        whole = dict(counts)
        for number in (1, 2):
            list(runs.call(number, runs.bands))
    assert not any(values for per in CacheScope for values in once._kept[per].values()), "a run that is over leaves nothing"
    for handle in handles:
        handle.remove()
    for name, number in counts.items():
        per = next(per for pattern, per in plan.items() if pattern.fullmatch(name))
        assert number == whole[name] * {CacheScope.CALL: 3, CacheScope.PROMPT: 1, CacheScope.BAND: 1 + BANDS}[per], name


@pytest.mark.slow
def test_the_comparison_sees_another_call_s_modulation(runs, monkeypatch):
    """The control: with all calls taken for one, outputs differ."""
    expected, begin = runs.everything((1,)), runs.engine.stage.module_cache.begin_step
    at_zero = lambda step: replace(step, timestep=torch.zeros_like(step.timestep))  # noqa: E731
    monkeypatch.setattr(runs.engine.stage.module_cache, "begin_step", lambda step, whole: begin(at_zero(step), whole))
    found = runs.everything((1,))
    with_time = any(
        isinstance(module, CachedModule) and module.cache_scope is CacheScope.CALL and "attn2" not in name
        for name, module in runs.engine.stage.model.named_modules()
    )
    assert with_time != all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_lora_changes_what_was_kept(runs, monkeypatch):
    """In the middle of a run, which ComfyUI never does, but at the same timestep as before it."""
    names = [name for name, module in runs.engine.stage.model.named_modules() if isinstance(module, CachedModule)]
    parameter = next(
        name
        for name, value in runs.engine.stage.model.named_parameters()
        if value.ndim == 2 and any(name.startswith(f"{module}.") for module in names)
    )
    delta = 0.1 * torch.ones(runs.engine.stage.model.get_parameter(parameter).shape)

    def adapted(then=lambda: runs.engine.adapted()) -> list[torch.Tensor]:
        with runs.run():
            before = list(runs.call(1, runs.bands))
            runs.engine.stage.adapters.add(m.Adapt(parameter, delta, None, 1.0))
            then()
            after = list(runs.call(1, runs.bands))
        runs.engine.stage.adapters.drop()
        runs.engine.adapted()
        assert all(out.isfinite().all() for out in before)
        return after

    found, stale = adapted(), adapted(then=lambda: None)
    monkeypatch.setattr(runs.engine.stage.module_cache, "begin_step", lambda step, whole: None)
    anew = adapted()
    assert all(torch.equal(a, b) for a, b in zip(found, anew, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(stale, anew, strict=True))  # the control


def test_outputs_of_prompts_and_bands_in_turn_stay_as_long_as_these_are_in_use():
    """However many: a limit would drop what comes next. CUDA graphs would then never find what they were captured with."""
    cache, bands = ModuleCache(torch.nn.Module(), {}), [Span(index, index + 1) for index in range(40)]

    def call(time: float, *prompts: int) -> list:
        """What each micro-step finds."""
        found, timestep = [], torch.tensor([time])
        for conditioning in prompts:
            for span in bands:
                step = m.Step(0, 1, conditioning, span, False, True, True, Span(0, 1), timestep, {}, (), None)
                cache.begin_step(step, whole=False)
                found.append(cache.pattern())
        return found

    first = call(0.9, 1, 2, 3)
    assert len(set(first)) == 3 * len(bands)
    assert call(0.8, 1, 2, 3) == first
    assert call(0.7, 2) == first[40:80]
    assert {key[0] for key in cache._kept[CacheScope.BAND]} == {1, 2, 3}
    assert call(0.6, 2) == first[40:80]
    held = {per: len(outputs) for per, outputs in cache._kept.items()}
    assert held == {CacheScope.CALL: 1, CacheScope.PROMPT: 1, CacheScope.BAND: len(bands)}
    cache.drop(2)
    assert not any(cache._kept.values())
