"""What is added to the weights on the ranks equals a checkpoint that it was added to, and goes away without a trace."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lora import Delta
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.wire import messages as m
from testing import mini

DEGREES = [Degrees(), Degrees(pipe=2), Degrees(tensor=2), Degrees(ulysses=2)]
LIMIT = 1e-5
SHOWS = 0.01
"""Relative change of the output that says that a delta was not just rounding."""


@pytest.fixture
def load(pools):
    """`load(path, degrees, ...)`: the mini model on ranks, which other tests get back as it was loaded."""
    used = []

    def load(*arguments, **named):
        used.append(pools.mini(*arguments, **named))
        return used[-1]

    yield load
    for model in used:
        if model._posting.error is None:
            model.adapt(None, (), lambda: None)


def lora(state: dict[str, torch.Tensor], seed: int = 5, rank: int = 4) -> list[Delta]:
    """A low-rank delta for every matrix, as strong as the matrix itself."""
    g = torch.Generator().manual_seed(seed)
    deltas = []
    for key, value in state.items():
        if value.ndim == 2:
            up, down = (torch.randn(*shape, generator=g) for shape in ((len(value), rank), (rank, value.shape[1])))
            deltas.append(Delta(key, up, down, float(value.std()) / rank**0.5))
    return deltas


def diffs(state: dict[str, torch.Tensor]) -> list[Delta]:
    """A full delta for every bias, norm, convolution and table, and for some matrices."""
    g = torch.Generator().manual_seed(6)
    chosen = {key: value for key, value in state.items() if value.ndim != 2 or ".1." in key}
    return [Delta(key, torch.randn(value.shape, generator=g), None, float(value.std())) for key, value in chosen.items()]


def merged(*arguments, **named) -> torch.nn.Module:
    """One process's mini model from `merged_file`."""
    return mini.load(merged_file(*arguments, **named))


def merged_file(path, deltas, folder, change=lambda key, value: value) -> Path:
    """A checkpoint whose tensors were added to. `change`: of its tensors, beforehand."""
    state = {key: change(key, value) for key, value in load_file(path).items()}
    for delta in deltas:
        whole = delta.up if delta.down is None else delta.up @ delta.down
        rows = delta.rows or Span(0, len(whole))
        state[delta.key][rows.slice] += delta.scale * whole
    with safe_open(path, framework="pt") as file:
        save_file(state, folder / "merged.safetensors", file.metadata())
    return folder / "merged.safetensors"


def output(model, given) -> torch.Tensor:
    return model.predict(ModelCall(*given), lambda: None)


def check(model, deltas, path, given, folder) -> torch.Tensor:
    """The output with these deltas, which equals the merged model's."""
    model.adapt(object(), deltas, lambda: None)
    found, expected = output(model, given), mini.reference(merged(path, deltas, folder), *given)
    assert mini.relative(found, expected) <= LIMIT
    return found


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_added_to_every_weight_as_to_the_file(load, mini_file, degrees, tmp_path):
    path = mini_file
    model, given, state = load(path, degrees), mini.inputs(), load_file(path)
    before = output(model, given)

    def changed(deltas):
        found = check(model, deltas, path, given, tmp_path)
        assert mini.relative(found, before) > SHOWS
        return found

    first = changed(lora(state))
    weaker = changed([replace(delta, scale=0.25 * delta.scale) for delta in lora(state)])
    assert mini.relative(weaker, first) > SHOWS
    assert mini.relative(changed(lora(state) + lora(state, seed=7, rank=3)), first) > SHOWS
    assert mini.relative(changed(lora(state) + diffs(state) + diffs(state)), first) > SHOWS
    model.adapt(None, (), lambda: None)
    assert torch.equal(output(model, given), before)


def test_rows_that_end_inside_a_parameter(load, mini_file, tmp_path):
    """Rows of linear1 from the middle of q to the middle of the feed-forward, and of the output norm across its halves."""
    path, given, width = mini_file, mini.inputs(), 128
    state = load_file(path)
    spans = {
        "single_blocks.1.linear1.weight": Span(width // 2, 4 * width),
        "final_layer.adaLN_modulation.1.weight": Span(width // 2, width + 7),
        "double_blocks.0.img_attn.qkv.bias": Span(width - 3, width + 3),
    }
    by_key = {delta.key: delta for delta in lora(state) + diffs(state)}
    deltas = [replace(by_key[key], up=by_key[key].up[rows.slice], rows=rows) for key, rows in spans.items()]
    check(load(path, Degrees(tensor=2)), deltas, path, given, tmp_path)


def test_deltas_that_fail_leave_nothing_behind(load, mini_file):
    model, given = load(mini_file, Degrees()), mini.inputs()
    before = output(model, given)

    def failing() -> Iterator[Delta]:
        yield from lora(load_file(mini_file))
        raise ValueError("a damaged file")

    with pytest.raises(ValueError, match="a damaged file"):
        model.adapt("failing", failing(), lambda: None)
    model.adapt(None, (), lambda: None)
    assert torch.equal(output(model, given), before)


@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(tensor=2)], ids=str)
def test_another_strength_of_each_layer(load, mini_file, degrees, tmp_path):
    path, given = mini_file, mini.inputs()
    model, deltas = load(path, degrees), lora(load_file(path))
    scaled = [replace(delta, scale=0.3 * delta.scale * (index % 3)) for index, delta in enumerate(deltas)]
    for each in (deltas, scaled, deltas):
        check(model, each, path, given, tmp_path)


@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(tensor=2)], ids=str)
def test_groups_are_weighed_without_being_sent_again(load, mini_file, monkeypatch, degrees, tmp_path):
    """As LoRAs in conditionings are: a strength for each call, with something that is always there."""
    path, given = mini_file, mini.inputs()
    model, state = load(path, degrees), load_file(path)
    base, first, second = lora(state), lora(state, seed=7) + diffs(state), lora(state, seed=8)
    grouped = [*base, *(replace(delta, group=1) for delta in first), *(replace(delta, group=2) for delta in second)]
    sent, told = [], model.pool.watchdog.sent
    monkeypatch.setattr(model.pool.watchdog, "sent", lambda message, number: (sent.append(message), told(message, number)))
    model.adapt("hooks", grouped, lambda: None)  # not weighed: the groups are at rest
    for strengths in ((), (1.0, 0.0), (0.0, 1.0), (0.5, -0.25), (0.0, 0.0), (1.0, 1.0)):
        sent.clear()
        model.adapt("hooks", iter(lambda: pytest.fail("looked at"), None), lambda: None, strengths)
        assert not any(isinstance(message, (m.Adapt, m.DropAdapters)) for message in sent)
        weighed = [(first, strengths[0]), (second, strengths[1])] if strengths else []
        together = base + [replace(each, scale=by * each.scale) for deltas, by in weighed for each in deltas]
        expected = mini.reference(merged(path, together, tmp_path), *given)
        assert mini.relative(output(model, given), expected) <= LIMIT
    model.adapt("hooks again", grouped, lambda: None)
    expected = mini.reference(merged(path, base, tmp_path), *given)
    assert mini.relative(output(model, given), expected) <= LIMIT


def test_another_lora_at_the_strengths_of_the_last_one(load, mini_file, tmp_path):
    path, given = mini_file, mini.inputs()
    model, state = load(path, Degrees(pipe=2)), load_file(path)
    for name, deltas in (("one", lora(state)), ("another", lora(state, seed=7))):
        model.adapt(name, [replace(each, group=1) for each in deltas], lambda: None, (1.0,))
        expected = mini.reference(merged(path, deltas, tmp_path), *given)
        assert mini.relative(output(model, given), expected) <= LIMIT, name


@pytest.mark.parametrize("dtype", ["fp32", "fp8_e4m3fn"])
def test_whole_values_take_the_place_of_the_files(load, mini_file, tmp_path, dtype):
    """As those of merged models do, with a LoRA on top; without them the file's values are there again."""
    path, given = mini_file, mini.inputs()
    model, state = load(path, Degrees(tensor=2), dtype), load_file(path)
    before = output(model, given)
    g = torch.Generator().manual_seed(11)
    values = {
        key: value + value.std().nan_to_num(0.1) * torch.randn(value.shape, generator=g) for key, value in state.items()
    }
    deltas = [*(Delta(key, value, instead=True) for key, value in values.items()), *lora(state), *diffs(state)]
    added = [Delta(key, value - state[key]) for key, value in values.items()] + lora(state) + diffs(state)
    model.adapt("a merge", deltas, lambda: None)
    expected = mini.reference(merged(path, added, tmp_path), *given)
    assert mini.relative(output(model, given), expected) <= LIMIT < SHOWS < mini.relative(before, expected)
    model.adapt(None, (), lambda: None)
    assert torch.equal(output(model, given), before)


def test_cancelled_while_they_are_sent(load, mini_file):
    """Cancel raises in `poll`: half a LoRA is not used for the next picture, and not taken for a whole one."""
    model, given, deltas = load(mini_file, Degrees(pipe=2)), mini.inputs(), lora(load_file(mini_file))
    model.adapt("a LoRA", deltas, lambda: None)
    whole = output(model, given)
    model.adapt(None, (), lambda: None)
    before = output(model, given)
    calls = iter([None] * 20)

    def cancel():
        if next(calls, "over") == "over":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.adapt("a LoRA", deltas, cancel)
    model.adapt("a LoRA, stronger", [replace(delta, scale=2 * delta.scale) for delta in deltas], lambda: None)
    model.adapt("a LoRA", deltas, lambda: None)
    assert torch.equal(output(model, given), whole)
    calls = iter([None] * 20)
    with pytest.raises(KeyboardInterrupt):
        model.adapt("another", lora(load_file(mini_file), seed=9), cancel)
    model.adapt(None, (), lambda: None)
    assert torch.equal(output(model, given), before)


def test_sent_again_to_a_model_that_was_loaded_again(load, mini_file):
    given, deltas = mini.inputs(), lora(load_file(mini_file))
    model = load(mini_file, Degrees(pipe=2))
    before = output(model, given)
    model.adapt("a LoRA", deltas, lambda: None)
    patched = output(model, given)
    fresh = load(mini_file, Degrees(pipe=2), fresh=True)
    assert torch.equal(output(fresh, given), before)
    fresh.adapt("a LoRA", deltas, lambda: None)
    assert torch.equal(output(fresh, given), patched)
    with pytest.raises(RuntimeError, match="another model"):
        model.adapt("a LoRA", deltas, lambda: None)
