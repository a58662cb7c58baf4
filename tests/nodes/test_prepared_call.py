"""Calls of a run that differ in values alone are prepared once, and others each for itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_backend.own_class.calls.call_arguments import STRUCTURE
from parallel_backend.own_class.plans.proof import Proof
from tests.nodes.test_sparse_attention import SETTINGS, override_of


def one_function(*_arguments):
    """What a node has put there."""


def other_function(*_arguments):
    """Another one."""


def options(**entries: Any) -> dict[str, Any]:
    return {"sigmas": 0.3 + 0.4 * torch.rand(1), "cond_or_uncond": [0], "uuids": [object()], **entries}


def call(**changed: Any) -> dict[str, Any]:
    """The arguments of a call, with new values."""
    given = {"x": torch.rand(1, 16, 8, 8), "timestep": torch.rand(1), "context": torch.rand(1, 5, 32), "guidance": 1}
    return {**given, "transformer_options": options(), **changed}


@pytest.fixture
def run(module, patcher, monkeypatch):
    """A sampling run of a MODEL whose calls are all proven. `answer(*arguments)` makes calls, `got` is what the ranks get of
    them, `prepared` has an entry for each that was prepared."""
    stub, got, prepared = patcher.model.diffusion_model, [], []
    proof = Proof(stub.own.blocks, "", "", "", latent=stub.own.latent, bands="", tensor="")

    def predict(_stub, each, *_others):
        got.append(each)
        return each.x

    def proven(*_arguments):
        prepared.append(proof)
        return proof

    monkeypatch.setattr(type(stub), "predict", predict)
    monkeypatch.setattr(module("model.call.prepared_call"), "proven", proven)
    monkeypatch.setattr(module("model.call.own_calls"), "_code_of_calls", lambda _own: "post_input")

    def answer(*arguments: dict[str, Any]) -> None:
        for each in arguments:
            module("model.call.answered_call").answered(stub, **each)

    return SimpleNamespace(answer=answer, stub=stub, got=got, prepared=prepared)


def test_values_flow_though_a_call_is_prepared_once(run):
    given = [call() for _ in range(3)]
    run.answer(*given)
    assert len(run.prepared) == 1
    for each, sent in zip(given, run.got, strict=True):
        assert torch.equal(sent.x, each["x"]) and torch.equal(sent.timestep, each["timestep"])
        assert sent.tensors["context"] is each["context"]
        assert torch.equal(sent.tensors[STRUCTURE], run.got[0].tensors[STRUCTURE])


DIFFERENT = {
    "more text": {"context": torch.rand(1, 6, 32)},
    "another size": {"x": torch.rand(1, 16, 8, 10)},
    "more entries": {"x": torch.rand(2, 16, 8, 8), "context": torch.rand(2, 5, 32)},
    "times in another dtype": {"timestep": torch.rand(1).double()},
    "another number": {"guidance": 2},
    "another type of number": {"guidance": 1.0},
    "a word more": {"transformer_options": options(of_class="some")},
    "a patch": {"transformer_options": options(patches={"unread": [one_function]})},
    "other prompts": {"transformer_options": options(cond_or_uncond=[1])},
}


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT)
def test_a_call_of_another_form_is_prepared_for_itself(run, changed):
    run.answer(call(), call(**changed), call(), call(**changed))
    assert len(run.prepared) == 2
    assert torch.equal(run.got[0].tensors[STRUCTURE], run.got[2].tensors[STRUCTURE])


def test_another_function_in_the_same_place_is_looked_at(run):
    run.answer(*(call(transformer_options=options(patches={"unread": [each]})) for each in (one_function, other_function)))
    assert len(run.prepared) == 2


def test_settings_of_sparse_attention_are_those_of_each_call(run):
    """Its node may put a new function on the MODEL before each evaluation."""
    patches = [SimpleNamespace(**SETTINGS | {"tau": tau}) for tau in (1.0, 2.0)]
    run.answer(*(call(transformer_options=options(optimized_attention_override=override_of(each))) for each in patches))
    assert len(run.prepared) == 1
    in_window = [each.changes.sparse for each in run.got]
    assert [None if sparse is None else sparse.tau for sparse in in_window] == [1.0, 2.0]


def test_a_function_is_refused_in_every_call_of_a_run(run):
    refused = call(transformer_options=options(patches={"post_input": [one_function]}))
    for _ in range(2):
        run.answer(call())
        with pytest.raises(ValueError, match=r"^model: .*'post_input'"):
            run.answer(refused)
    assert len(run.prepared) == 1


def test_calls_are_prepared_anew_for_another_setup_and_another_trial(run):
    run.answer(call())
    run.stub.setup = run.stub.setup.with_blocks(run.stub.own.blocks, run.stub.own.latent)
    run.answer(call(), call())
    assert len(run.prepared) == 2
    run.stub.prove(lambda _entries: None, [16])
    run.answer(call())
    assert len(run.prepared) == 3


def test_a_call_that_was_tried_before_the_run_is_prepared(run):
    run.stub.prove(lambda entries: run.answer(call(transformer_options=options(**entries))), [16], bands=False)
    assert not run.got
    run.answer(call())
    assert len(run.prepared) == len(run.got) == 1


def test_a_run_keeps_a_limited_number_of_them(module, run):
    most = module("model.call.prepared_call").MOST_PREPARED
    run.answer(*(call(guidance=number) for number in range(most + 3)))
    assert len(run.stub.run.prepared) == 3
