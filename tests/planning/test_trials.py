"""Modes that trials of ComfyUI's own class have not proven are no modes of a plan."""

from dataclasses import replace

import pytest

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnBlock, OwnClass, OwnLatent
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.planning.modes import possible
from parallel_backend.planning.trials import Trials
from tests.planning.test_planner import workload

OWN = OwnClass("Kind", "/", "comfy.ldm.kind", "Kind", "{}", (), (), (), (), False)
LATENT = OwnLatent(0, before=False, patch=(1, 2, 2), words=False, pads=True)
ALL = Proof((OwnBlock("blocks.0", ("0",), True),), "", "", "", latent=LATENT, bands="")
DISPLACED = {"patch": 2, "patch_mode": "displaced"}


@pytest.mark.parametrize(
    ("lacking", "refused"),
    [
        ({}, []),
        ({"stages": "they run twice"}, ["pipe"]),
        ({"batch": "entries look at each other"}, ["batch"]),
        ({"sequence": "it attends outside of its blocks"}, ["ulysses", "ring"]),
        ({"latent": None, "bands": "its prologue mixes the latent"}, ["patch"]),
    ],
)
def test_unproven_modes_are_refused_with_the_reason(lacking, refused):
    trials = Trials(OWN, {1: replace(ALL, **lacking)})
    every = {axis: Degrees(**{axis: 2}) for axis in ("pipe", "batch", "ulysses", "ring")} | {"patch": Degrees(**DISPLACED)}
    found = {axis: why for axis, degrees in every.items() if (why := trials.lacks(degrees))}
    assert list(found) == [axis for axis in every if axis in refused]
    assert all(reason in found[axis] for axis in refused for reason in lacking.values() if reason)


def test_tensor_degrees_are_proven_one_by_one_and_with_products():
    trials = Trials(OWN, {1: ALL})
    both = Degrees(tensor=2, ulysses=2)
    assert NOT_TRIED in trials.lacks(Degrees(tensor=2))
    guessed = replace(trials, guesses=True)
    assert guessed.lacks(both) == ""
    assert guessed.with_tensor(2, "too little memory").lacks(both).endswith("too little memory.")
    alone = replace(ALL, tensor="", sequence="both together give a different result")
    tried = guessed.with_tensor(2, alone)
    assert (tried.lacks(Degrees(tensor=2)), tried.lacks(Degrees(ulysses=4))) == ("", "")
    assert "ulysses_degree is 2" in tried.lacks(both)
    assert tried.class_for(Degrees(tensor=2)).blocks == alone.blocks


def test_a_plan_has_proven_modes_alone():
    trials = Trials(OWN, {1: replace(ALL, sequence="its tokens", latent=None, bands="its latent")})
    modes, refused = possible(replace(workload(prompts=2), trials=trials), 2)
    assert {str(mode.degrees) for mode in modes} <= {"pipefusion_degree 2", "split_batch_degree 2"}
    assert "its tokens" in refused[Degrees(ulysses=2)]
    assert NOT_TRIED in refused[Degrees(tensor=2)]
