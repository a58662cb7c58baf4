"""What a rank computes once for all bands of a call is as good as computed anew. Trials show which modules that is."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.core.spans import Span, split
from parallel_backend.rank.stage.module_cache import CachedModule, ModuleCache
from parallel_backend.wire import messages as m
from testing import mini
from tests.support.one_rank import OneRank

BANDS = 2


class Runs(OneRank):
    """Two conditionings, and calls in bands with them."""

    def __init__(self, path):
        super().__init__(path)
        self.x, self.timestep, tensors = mini.inputs()
        for number in (1, 2):
            self.put(self.x, tensors | {"context": tensors["context"] * number}, number)
        rows = self.built.patching.grid(tuple(self.x.shape))[0]
        self.bands = [self.token_order.of_rows(span) for span in split(Span(0, rows), BANDS)]

    @property
    def cache(self):
        return self.stage.module_cache

    @property
    def cached(self) -> dict[str, CachedModule]:
        return {name: module for name, module in self.stage.model.named_modules() if isinstance(module, CachedModule)}

    def call(self, number: int, spans: list[Span], conditioning: int = 1) -> Iterator[torch.Tensor]:
        """Micro-steps of one call, at a timestep and with a latent of its own."""
        x, timestep = self.x * (1 + number / 7), self.timestep * (1 - number / 10)
        for index, span in enumerate(spans):
            yield self.step(x, timestep, 1, span, index == 0, conditioning)

    @contextmanager
    def run(self):
        self.engine.open_run(m.OpenRun(1, True))
        yield
        self.engine.close_run(1)

    def everything(self) -> list[torch.Tensor]:
        with self.run():
            outputs = list(self.call(0, [self.token_order.span]))
            for number in (1, 2):
                for conditioning in (1, 2):
                    outputs += self.call(number, self.bands, conditioning)
        return outputs


@pytest.fixture(scope="module")
def runs(mini_file):
    return Runs(mini_file)


def test_kept_is_as_good_as_computed_anew_bit_for_bit(runs, monkeypatch):
    kept, begin = runs.everything(), runs.cache.begin_step
    with monkeypatch.context() as patch:
        patch.setattr(runs.cache, "begin_step", lambda step, whole: None)
        anew = runs.everything()
    again = runs.everything()
    for a, b, c in zip(kept, anew, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    # The control: with all calls taken for one, outputs differ.
    at_zero = lambda step: replace(step, timestep=torch.zeros_like(step.timestep), conditioning=1)  # noqa: E731
    monkeypatch.setattr(runs.cache, "begin_step", lambda step, whole: begin(at_zero(step), whole))
    assert not all(torch.equal(a, b) for a, b in zip(kept, runs.everything(), strict=True))


def test_each_is_computed_once_in_a_call(runs):
    counts, handles = defaultdict(int), []
    for name, module in runs.cached.items():
        count = lambda *_args, name=name: counts.update({name: counts[name] + 1})  # noqa: E731
        handles.append(module.register_forward_hook(count))
    with runs.run():
        list(runs.call(0, [runs.token_order.span]))
        whole = dict(counts)
        assert not runs.cache.outputs, "a whole call keeps nothing"
        for number in (1, 2):
            list(runs.call(number, runs.bands))
    assert not runs.cache.outputs, "a run that is over leaves nothing"
    for handle in handles:
        handle.remove()
    assert any(name.endswith("mod") for name in counts) and "time_in" in counts
    assert counts == {name: 3 * number for name, number in whole.items()}


def test_a_lora_changes_what_was_kept(runs, monkeypatch):
    """In the middle of a run, which ComfyUI never does, but at the same timestep as before it."""
    parameter = "time_in.in_layer.weight"
    assert "time_in" in runs.cached
    delta = 0.1 * torch.ones(runs.stage.model.get_parameter(parameter).shape)

    def adapted(then=lambda: runs.engine.adapted()) -> list[torch.Tensor]:
        with runs.run():
            list(runs.call(1, runs.bands))
            runs.stage.adapters.add(m.Adapt(parameter, delta, None, 1.0))
            then()
            after = list(runs.call(1, runs.bands))
        runs.stage.adapters.drop()
        runs.engine.adapted()
        return after

    found, stale = adapted(), adapted(then=lambda: None)
    monkeypatch.setattr(runs.cache, "begin_step", lambda step, whole: None)
    anew = adapted()
    assert all(torch.equal(a, b) for a, b in zip(found, anew, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(stale, anew, strict=True))  # the control


def test_outputs_of_a_prompt_that_is_gone_are_dropped(runs):
    with runs.run():
        next(runs.call(1, runs.bands, 2))
        assert runs.cache.outputs
        runs.engine.drop_conditioning(1)
        assert runs.cache.outputs
        runs.engine.drop_conditioning(2)
        assert not runs.cache.outputs


class Timed(torch.nn.Module):
    """Adds `time` to its input."""

    time, runs = 0.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.time


def test_outputs_of_a_prompt_are_kept_once_two_timesteps_gave_the_same():
    model = torch.nn.ModuleDict({"text": Timed(), "timed": Timed()})
    cache = ModuleCache(model, ("text", "timed"), ("text", "timed"))

    def call(time: float, conditioning: int = 1, whole: bool = True) -> None:
        prompt = torch.full((1, 3), float(conditioning))
        model["timed"].time = time
        cache.begin_step(
            SimpleNamespace(conditioning=conditioning, entries=Span(0, 1), timestep=torch.tensor([time])), whole
        )
        assert torch.equal(model["text"](prompt), prompt)
        assert torch.equal(model["timed"](prompt), prompt + time)
        cache.end_step()

    def runs(*calls: tuple) -> tuple[int, int]:
        before = [each.runs for each in model.values()]
        for each in calls:
            call(*each)
        return tuple(each.runs - count for each, count in zip(model.values(), before, strict=True))

    assert runs((0.9,), (0.9,), (0.8,)) == (3, 3)
    assert runs((0.7,), (0.6, 1, False), (0.5,)) == (0, 3)
    assert runs((0.5, 2), (0.4, 2), (0.3, 2)) == (2, 3)
    cache.drop(2)
    assert runs((0.3, 2), (0.3,)) == (1, 2)
    cache.forget()
    assert runs((0.3,)) == (1, 1)
