"""A text that sees no image runs once a run: the same outputs, in every mode, and nothing of it where it may not be used."""

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.core.block_changes import KEPT_INT4, KEPT_INT8, UNCHANGED, BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.kitchen import kitchen
from parallel_backend.core.packed_values import packed_value_bytes
from parallel_backend.core.setup import Setup
from parallel_backend.core.spans import Span
from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import TEXT_ENDS
from parallel_backend.families.qwen_image21 import PLACES, POSITIONS, prefix_tensors
from parallel_backend.placement.memory_model import Request, memory_of
from parallel_backend.placement.model_sizes import model_sizes
from parallel_backend.rank.attention import ulysses
from parallel_backend.rank.attention.prefix_keys import PrefixKeys
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.kept_texts import KeptTexts
from parallel_backend.rank.loaded_stage import LoadedStage
from parallel_backend.wire import messages as m
from parallel_backend.wire.heartbeat import Heartbeat
from testing import tiny
from testing.cases import all_cases
from testing.cases.case import PAIRS
from tests.support.alone import nobody

pytestmark = pytest.mark.threads

CASE = next(case for case in all_cases() if case.name == "qwen-image-2.1-edit")
TOLERANCE = 1e-5
MODES = (
    *PAIRS,
    Degrees(pipe=2, ulysses=2),
    Degrees(ring=2, ulysses=2),
    Degrees(patch=2, ulysses=2, patch_mode="displaced"),
    Degrees(ring=2, patch=2, patch_mode="displaced"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the class with random weights, its file)."""
    model = CASE.model()
    return model, CASE.save(model, tmp_path_factory.mktemp("kept texts") / "model.safetensors")


def step(seq, conditioning=1, entries=Span(0, 2), run=0, with_text=True, **others):  # noqa: B008 (frozen)
    """A micro-step of the whole picture. `others`: timestep, x and tokens."""
    inputs = {"timestep": torch.zeros(2), "x": None, "tokens": Span(0, 1)} | others
    return m.Step(seq=seq, run=run, conditioning=conditioning, with_text=with_text, stale=False, overlap=True,
                  entries=entries, residuals={}, added=(), **inputs)  # fmt: skip


@pytest.fixture
def texts():
    return KeptTexts(FAMILIES["qwen-image-2.1"])


def test_each_entry_s_text_runs_once_for_a_conditioning_and_a_run(texts):
    first, second = Span(0, 1), Span(1, 2)
    steps = [step(1, entries=first), step(2, entries=first), step(3, entries=second), step(4), step(5, 2), step(6, run=1)]
    assert [texts.of(each).with_text for each in steps] == [True, False, True, False, True, True]


def test_a_micro_step_that_was_looked_at_is_decided_once(texts):
    assert [texts.of(each).with_text for each in (step(1), step(2), step(1), step(2))] == [True, False, True, False]


def test_a_text_that_some_entries_lack_runs_for_all_of_the_micro_step(texts):
    assert [texts.of(each).with_text for each in (step(1, entries=Span(0, 1)), step(2), step(3))] == [True, True, False]


@pytest.mark.parametrize(
    ("drop", "again"),
    [
        pytest.param(lambda texts: texts.close_run(1), (True, True, True), id="the run ends"),
        pytest.param(lambda texts: texts.close_run(2), (True, True, False), id="another run ends"),
        pytest.param(lambda texts: texts.drop_conditioning(1), (True, False, True), id="the conditioning goes"),
        pytest.param(lambda texts: texts.drop_conditioning(2), (False, True, False), id="another conditioning goes"),
        pytest.param(lambda texts: texts.forget(), (True, True, True), id="weights change"),
    ],
)
def test_what_ends_has_its_texts_run_again(texts, drop, again):
    """Of two conditionings outside of runs, and one in run 1."""
    kinds = ({}, {"conditioning": 2}, {"run": 1})
    for seq, kind in enumerate(kinds):
        texts.of(step(seq, **kind))
    drop(texts)
    assert tuple(texts.of(step(10 + seq, **kind)).with_text for seq, kind in enumerate(kinds)) == again


def test_a_decision_does_not_outlive_what_it_was_made_of(texts):
    assert [texts.of(step(1)).with_text, texts.of(step(2)).with_text] == [True, False]
    texts.forget()
    assert texts.of(step(2)).with_text


def test_other_families_texts_run_in_every_call():
    texts = KeptTexts(FAMILIES["wan-animate-2"])
    assert [texts.of(step(seq)).with_text for seq in (1, 2)] == [True, True]


def expected(model, call):
    with torch.inference_mode():
        return CASE.reference(model, call.x, call.timestep, call.tensors)


def sent(model) -> int:
    """Bytes that ranks have sent each other since the last time; the run ends."""
    return sum(sum(rank.bytes_sent.values()) for rank in model.close_run(model.open_run(), lambda: None))


@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_later_calls_send_the_picture_alone_and_equal_the_class(pools, made, degrees):
    whole, path = made
    model = pools.load(path, degrees, fresh=True)
    x, timestep, tensors = CASE.inputs()
    other = CASE.inputs(seed=2)[2]
    calls = [ModelCall(x * scale, timestep * scale, given) for scale, given in ((1, tensors), (0.8, tensors), (0.6, other))]
    calls += [ModelCall(x * 0.5, timestep * 0.5, given) for given in (tensors, other)]
    for call in calls:
        assert tiny.relative(model.predict(call, lambda: None), expected(whole, call)) <= TOLERANCE
    sent(model)
    outputs, bytes_sent = [], []
    for _ in range(2):  # runs
        for _ in range(2):
            outputs.append(model.predict(calls[0], lambda: None))
        bytes_sent.append(sent(model))
        model.predict(calls[0], lambda: None)
        bytes_sent.append(sent(model))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert bytes_sent[0] == bytes_sent[2] and bytes_sent[1] == bytes_sent[3]
    if degrees.batch == 1:  # two calls, whose text has run once, against one
        assert bytes_sent[0] < 2 * bytes_sent[1]


def test_heads_in_two_groups_find_the_keys_of_theirs(pools, made, monkeypatch):
    """As on GPUs, where one group's exchange overlaps another group's attention."""
    monkeypatch.setitem(ulysses.HEAD_GROUPS, "cpu", 2)
    model, (x, timestep, tensors) = pools.load(made[1], Degrees(ulysses=2), fresh=True), CASE.inputs()
    for scale in (1, 0.8):
        call = ModelCall(x * scale, timestep * scale, tensors)
        assert tiny.relative(model.predict(call, lambda: None), expected(made[0], call)) <= TOLERANCE


def test_positions_and_ends_of_a_prefix():
    """Of 3 words with a picture of 2 x 1 tokens before the last, by hand."""
    found = prefix_tensors(3, [(2, 1)], [2])
    assert found[PLACES].tolist() == [[0, 1, 3, 4, 2]]
    assert found[TEXT_ENDS].tolist() == [[1, 2, 4, 4, 5]]
    words, picture = [[0, 0, 0, 0], [1, 1, 1, 0]], [[2, -1, -0.5, 1], [2, 0, -0.5, 1]]
    assert found[POSITIONS].tolist() == [[*words, *picture, [4, 4, 4, 0], [5, 0, 0, 0]]]


@pytest.fixture
def engine(made):
    """One rank in this process, with a conditioning."""
    checkpoint = open_checkpoint(made[1])
    load = m.Load(Setup(made[1], "fp32", ("cpu",), Degrees(), "auto"), (Span(0, CASE.config["num_layers"]),), (1.0,))
    engine = Engine(0, load, LoadedStage(0, torch.device("cpu"), load, lambda fraction: None, nobody(), Heartbeat()))
    x, _, tensors = CASE.inputs()
    grid = checkpoint.family.patching.grid(tuple(x.shape))
    engine.put_conditioning(m.PutConditioning(1, grid, 0, checkpoint.family.inputs.text_tokens(tensors), 2, tensors))
    return engine


def computed(engine, seq, time):
    """The output of a whole call at `time`."""
    patching, (x, timestep, _) = FAMILIES["qwen-image-2.1"].patching, CASE.inputs()
    tokens = patching.pack(x * time)
    sizes = {"timestep": timestep * time, "x": tokens, "tokens": Span(0, tokens.shape[1])}
    return engine.step(step(seq, **sizes), None).value


def test_kept_keys_give_the_same_bit_for_bit_as_keys_of_this_call(engine, monkeypatch):
    computed(engine, 1, 1.0)
    kept = computed(engine, 2, 0.8)
    monkeypatch.setattr(KeptTexts, "of", lambda _texts, micro_step: micro_step)
    assert torch.equal(kept, computed(engine, 3, 0.8))


def put(engine, tensors, changes=UNCHANGED):
    """As conditioning 1."""
    grid = tuple(CASE.inputs()[0].shape[2:])
    engine.put_conditioning(m.PutConditioning(1, grid, 0, tensors[TEXT_ENDS].shape[1], 2, tensors, changes=changes))


def test_a_conditioning_that_is_sent_again_has_its_text_run(engine):
    before = computed(engine, 1, 1.0)
    put(engine, CASE.inputs()[2])
    assert torch.equal(computed(engine, 2, 1.0), before)


def test_a_conditioning_that_was_dropped_leaves_no_keys(engine):
    before = computed(engine, 1, 1.0)
    engine.drop_conditioning(1)
    put(engine, CASE.inputs(seed=2)[2])
    assert not torch.equal(computed(engine, 2, 1.0), before)


@pytest.mark.parametrize("stored", ["", KEPT_INT8, pytest.param(KEPT_INT4, id="int4, for which heads are too small")])
def test_kept_keys_are_the_bytes_that_were_predicted_and_go_with_the_run(engine, made, stored):
    x, _, tensors = CASE.inputs()
    put(engine, tensors, BlockChanges(kept_text=stored))
    without = engine.run_bytes
    computed(engine, 1, 1.0)
    tokens = tensors[TEXT_ENDS].shape[1]
    request = Request((len(x[0, 0]), len(x[0, 0, 0])), 0, tokens, len(x), kept_text=stored)
    sizes, stages = model_sizes(open_checkpoint(made[1]), "fp32", "cpu"), (Span(0, CASE.config["num_layers"]),)
    predicted = memory_of(sizes, Degrees(), stages, 0, (request,)).buffers
    assert engine.run_bytes - without == predicted > 0
    assert predicted == 2 * memory_of(sizes, Degrees(tensor=2), stages, 1, (request,)).buffers
    engine.close_run(0)
    assert engine.run_bytes == without


def test_a_text_in_fewer_bits_is_close_and_the_same_in_every_call_and_mode(pools, made):
    """Rows are quantised by token and head, so ranks have the values that one has. The first call reads them too."""
    least, most = 1e-5, 0.02
    x, timestep, tensors = CASE.inputs()
    call = ModelCall(x, timestep, tensors, changes=BlockChanges(kept_text=KEPT_INT8))
    model = pools.load(made[1], Degrees(), fresh=True)
    exact = model.predict(ModelCall(x, timestep, tensors), lambda: None)
    found = model.predict(call, lambda: None)
    assert least < tiny.relative(found, exact) < most
    assert torch.equal(model.predict(call, lambda: None), found)
    for degrees in (Degrees(ulysses=2), Degrees(ring=2), Degrees(pipe=2), Degrees(tensor=2), Degrees(batch=2)):
        shared = pools.load(made[1], degrees, fresh=True)
        # A value that lies between two steps may go to the other one.
        assert tiny.relative(shared.predict(call, lambda: None), found) < least, degrees


@pytest.mark.parametrize(
    ("stored", "name", "settings", "value_bytes"),
    [
        (KEPT_INT8, "TensorWiseINT8Layout", {"is_weight": True, "per_channel": True, "convrot": True}, 1),
        (KEPT_INT4, "TensorCoreConvRotW4A4Layout", {}, 0.5),
    ],
)
def test_rows_in_fewer_bits_are_those_of_comfy_kitchen_s_layout(stored, name, settings, value_bytes):
    Layout = getattr(kitchen().tensors, name)
    x = torch.randn(2, 5, 3, 128, generator=torch.Generator().manual_seed(0))
    keys = PrefixKeys(2, stored)
    for entry in range(2):  # one after the other
        keys.put(0, x[entry : entry + 1], -x[entry : entry + 1], Span(entry, entry + 1), first=4)
    expected = Layout.dequantize(*Layout.quantize(x.flatten(0, 2), convrot_groupsize=64, **settings)).view(x.shape)
    found, values = keys.of(0, Span(0, 2), Span(5, 7))
    assert torch.equal(found, expected[:, :, 1:])
    assert torch.equal(values, -expected[:, :, 1:])
    assert keys.nbytes == 2 * x.numel() * packed_value_bytes(stored, 128) == 2 * x.numel() * (value_bytes + 4 / 128)
    again = PrefixKeys(2, stored)
    again.put(0, x, x, Span(0, 2), first=0)
    again.put(0, 2 * x[:1], x[:1], Span(0, 1), first=0)  # of another call
    assert torch.allclose(again.of(0, Span(0, 1), Span(0, 3))[0], 2 * expected[:1], atol=1e-5)


def test_changed_weights_have_the_text_run_again(engine):
    computed(engine, 1, 1.0)
    shape = engine.stage.model.get_parameter(name := "txt_in.in_layer.weight").shape
    before = computed(engine, 2, 0.8)
    engine.stage.adapters.add(m.Adapt(name, 0.1 * torch.ones(shape), None, 1.0))
    engine.adapted()
    changed = computed(engine, 3, 0.8)
    assert not torch.equal(before, changed)
    engine.stage.adapters.drop()
    engine.adapted()
    assert torch.equal(computed(engine, 4, 0.8), before)


def test_a_replica_may_have_no_entry_of_a_call(made, pools):
    """CFG 1 with a split_batch_degree of 2."""
    model, file = made
    given = CASE.inputs(batch=1)
    found = pools.load(file, Degrees(batch=2)).predict(ModelCall(*given), nobody)
    assert tiny.relative(found, CASE.reference(model, *given)) <= TOLERANCE
