"""Shipped plans: what they prove is taken without a trial. A changed class, another class or a damaged file has none."""

import dataclasses
import json
import sys
import types

import pytest

from parallel_backend.core.kept_file import write_kept
from parallel_backend.core.own_class import OwnAttention, OwnBlock, OwnClass, OwnCut, OwnLatent, OwnSlice
from parallel_backend.own_class.plans import plan as plans
from parallel_backend.own_class.plans.plan import Asked, Plan, key_of, of_json, path_of, without
from parallel_backend.own_class.plans.proof import Proof
from scripts.plans.plan_json import lists_of, to_json

SLICES = (OwnSlice(1, 1, (0,), True), OwnSlice(2, 1, (1,), False))
MIDDLE = OwnBlock(
    "", ("0", ""), False, SLICES[1:], (OwnAttention((0,), (), 4, 8),),
    cuts=(OwnCut("proj", "row", (8, 8)),), divided=(("attn", "heads"),),
)  # fmt: skip
FIRST = dataclasses.replace(MIDDLE, slices=SLICES)
LAST = dataclasses.replace(MIDDLE, leaving=((0,), ()))
SINGLE = dataclasses.replace(MIDDLE, returns=("img",), alone=True)
NAMES = {"double": [f"double.{number}" for number in range(5)], "single": ["single.0", "single.1"], "refiner": ["refiner.0"]}
LATENT = OwnLatent(0, False, (1, 2, 2), True, True)
BLOCKS = [FIRST, MIDDLE, MIDDLE, MIDDLE, LAST, SINGLE, SINGLE]
PROOF = Proof(
    tuple(
        dataclasses.replace(block, name=name) for block, name in zip(BLOCKS, NAMES["double"] + NAMES["single"], strict=True)
    ),
    *("", "why not: π", ""),
    numbers=("words",),
    options=("sigmas",),
    latent=LATENT,
    bands="",
    tensor="",
)
OWN = OwnClass(
    kind="New", folder="/nowhere", module="comfy.ldm.new.model", name="New", arguments='{"depth": 5, "width": 64}',
    settings=(), imports=(), keys=(), halves=(), video=False,
)  # fmt: skip
ASKED = Asked("form", frozenset({"sigmas", "callbacks"}), (1.0, 0.5, 0.0), 2, {"words": 40, "scale": 3}, True, True, 2)
CODE = """import comfy.ops
from torch import nn
class New(nn.Module):
    def __init__(self, depth, width, heads=4, sides=(1, 2), **others):
        assert others.get("norm") in (None, "rms")
"""
PLAN = Plan(
    name="new", kind="New", arguments=without({"depth": 5, "width": 64}, ("depth",)), depths=("depth",), form="form",
    options=("callbacks", "more", "sigmas"), times=(1.0, 0.5, 0.0), entries=(), tensor=(1, 2), numbers=(("scale", 3.0),),
    lists=lists_of(PROOF.blocks), proof=dataclasses.replace(PROOF, blocks=()),
)  # fmt: skip


def asked(**changes) -> Asked:
    return dataclasses.replace(ASKED, **changes)


def own(**changes) -> OwnClass:
    return dataclasses.replace(OWN, **changes)


def test_a_plan_comes_back_from_json():
    text = json.dumps(to_json(PLAN))
    assert of_json(Plan, json.loads(text)) == PLAN
    assert of_json(Plan, json.loads(text)).whole(NAMES) == PROOF
    assert len(PLAN.lists[0].blocks) == 3 and len(PLAN.lists[1].blocks) == 1


def test_a_deeper_model_has_the_same_plan():
    deeper = NAMES | {"double": [f"double.{number}" for number in range(9)]}
    blocks = PLAN.whole(deeper).blocks
    assert [block.name for block in blocks] == deeper["double"] + deeper["single"]
    assert [block.slices for block in blocks[:9]] == [SLICES, *[SLICES[1:]] * 8]
    with pytest.raises(KeyError):
        PLAN.whole({"single": NAMES["single"]})


@pytest.mark.parametrize(
    ("the_class", "call"),
    [
        (own(kind="Newer"), ASKED),
        (own(arguments='{"depth": 5, "width": 128}'), ASKED),
        (own(), asked(form="another")),
        (own(), asked(tensor=4)),
        (own(), asked(options=frozenset({"sigmas", "unknown"}))),
        (own(), asked(options=frozenset({"callbacks"}))),
        (own(), asked(times=(1.0, 0.0))),
        (own(), asked(numbers={"words": 40, "scale": 4})),
    ],
)
def test_nothing_else_is_served(the_class, call):
    assert not PLAN.serves(the_class.kind, json.loads(the_class.arguments), call)


def test_a_plan_of_some_batches_serves_no_other():
    plan = dataclasses.replace(PLAN, entries=(1, 2))
    served = [plan.serves(OWN.kind, json.loads(OWN.arguments), asked(entries=entries)) for entries in (1, 2, 3)]
    assert served == [True, True, False]


@pytest.mark.parametrize(
    ("changes", "way"),
    [({"sequence": "why not"}, "sequence"), ({"latent": None, "bands": "why not"}, "bands")],
)
def test_a_refusal_is_not_served(changes, way):
    plan = dataclasses.replace(PLAN, proof=dataclasses.replace(PLAN.proof, **changes))
    assert not plan.serves(OWN.kind, json.loads(OWN.arguments), ASKED)
    assert plan.serves(OWN.kind, json.loads(OWN.arguments), asked(**{way: False}))


@pytest.fixture
def shipped(module, monkeypatch, tmp_path):
    """(class, its code's file, what is found for a class): the class's plan is shipped."""
    code = tmp_path / "comfy" / "ldm" / "new" / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text(CODE)
    new_module = types.ModuleType("comfy.ldm.new.model")
    exec(CODE, vars(new_module))  # noqa: S102
    monkeypatch.setitem(sys.modules, "comfy.ldm.new.model", new_module)
    (tmp_path / "comfy" / "ops.py").write_text("")
    monkeypatch.setattr(plans, "PLANS", tmp_path / "plans")
    the_class = own(folder=str(tmp_path))
    class_code = module("model.loading.class_code")
    digest = class_code.code_digest(class_code.class_code(the_class, helpers=False))
    write_kept(path_of(the_class), key_of(the_class, digest), plans.NAME, [to_json(PLAN)])
    shipped_plans = module("model.loading.shipped_plans")
    return the_class, code, lambda each: shipped_plans.shipped_proof(each, ASKED, NAMES)


def test_a_shipped_plan_takes_the_place_of_a_trial(module, shipped):
    the_class, code, found = shipped
    assert found(the_class) == (PROOF, module("model.loading.shipped_plans").SHIPPED)
    (code.parents[2] / "ops.py").write_text("x = 1\n")
    assert found(the_class)[0] == PROOF, "the class's own modules alone count"
    assert found(dataclasses.replace(the_class, name="Another")) == (None, ""), "a class without plans"


@pytest.mark.parametrize(
    ("more", "is_served"),
    [
        ({"heads": 4, "sides": [1, 2], "of_no_code": 3}, True),
        ({"heads": 8}, False),
        ({"norm": "rms"}, False),
    ],
)
def test_arguments_that_cannot_matter_may_differ(shipped, more, is_served):
    the_class, _, found = shipped
    changed = dataclasses.replace(the_class, arguments=json.dumps({"depth": 5, "width": 64} | more))
    assert (found(changed)[0] is not None) == is_served


def test_a_changed_class_has_no_plan(module, shipped):
    the_class, code, found = shipped
    code.write_text(CODE + "x = 1\n")
    assert found(the_class) == (None, module("model.loading.shipped_plans").CHANGED)


@pytest.mark.parametrize("damage", ["", "{}", "[1]", "changed", "field", "list"])
def test_a_damaged_plan_is_not_believed(shipped, caplog, damage):
    the_class, _, found = shipped
    path = path_of(the_class)
    whole = json.loads(path.read_text())
    if damage == "changed":  # and the digest is not
        path.write_text(path.read_text().replace("why not", "why"))
    elif damage in ("field", "list"):
        content = to_json(PLAN) | ({"unknown": 1} if damage == "field" else {"tensor": 2})
        write_kept(path, whole["key"], plans.NAME, [content])
    else:
        path.write_text(damage)
    assert found(the_class) == (None, "")
    assert "has no usable plans" in caplog.text


FILES = sorted(plans.PLANS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_shipped_file_can_be_read(path):
    key = json.loads(path.read_text())["key"]
    module_name, _, name = key["class"].rpartition(".")
    the_class = own(module=module_name, name=name)
    assert path_of(the_class) == path
    read = plans.read_plans(the_class, key["code"])
    assert read and plans.read_plans(the_class, "other code") is None
    assert len({(plan.name, plan.lists, plan.tensor) for plan in read}) == len(read)
