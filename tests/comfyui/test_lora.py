"""LoRA by ComfyUI's own loaders: the parallel MODEL gives what ComfyUI's own model gives with the same file.

A family decides names and shapes of weights. SD3 has in the default tier what shows its own; all else is Flux's there.
"""

import itertools
from collections.abc import Iterable, Iterator

import pytest

from tests.comfyui.conftest import mostly_full, unselected

pytestmark = pytest.mark.comfyui

LIMIT = 5e-5
FAMILIES = ("Flux", "SD3")
LIKE_NATIVE = (
    *("kohya", "diffusers", "original", "all steps warm-up", "weaker", "negative", "two on one another"),
    *("differences", "LoHa", "LoKr", "text encoder's patches"),
)
SAID = {
    "none fits": "this LoRA is for another model: its only layer does not fit (double_blocks.0.img_attn.proj.weight is "
    "[256, 256], the tensors for it are [256, 4], [4, 128])",
    "enlarging": "a LoRA that enlarges double_blocks.0.img_attn.proj.weight to [256, 512] cannot run on ranks: ComfyUI has "
    "no class Flux of that size",
    "factors of a LoHa": "ComfyUI cannot compute with the LOHA for double_blocks.0.img_attn.proj.weight (",
    "factors of a LoKr": "ComfyUI cannot compute with the LOKR for double_blocks.0.img_attn.proj.weight (",
    "set": "ComfyUI cannot compute with the difference for double_blocks.0.img_attn.proj.weight (",
    "making smaller": "(it makes [256, 128] of the weight)",
    "weight wrapper": "a wrapper around the weight a",
    "injection": "what another node injects into the model ('of another node')",
}


ENLARGED = (
    *("enlarging", "enlarging, all steps warm-up", "enlarging, tensor_parallel_degree 2"),  # the default tier's
    *("enlarging behind a LoRA of the first layer", "enlarging before a LoRA of the first layer"),
)
OTHER_MODES = ("Apply PipeFusion before", "tensor_parallel_degree 2")
IN_TURN, AGAIN = "two clones in turn", "ranks started again"
OF_SD3 = ("kohya",)
"""Cases that SD3 has in the default tier."""
IN_FULL = (
    *("weaker", "negative", "Apply PipeFusion before"),
    *("hook of one prompt", "two hooks together", "keyframes of whole differences", "hooks beside a LoRA in bypass mode"),
    *("bypass beside a LoRA", "bypass once more", "ModelSave of a merge", "LoraSave of whole differences"),
    *("merge of ours into the native", "merge of the native into ours", "merge by blocks"),
)
"""Cases that the default tier has in another form."""
FAMILY = pytest.mark.parametrize("family", mostly_full(FAMILIES, FAMILIES[:1]))


def of_families(cases: Iterable[str]) -> Iterator[pytest.param]:
    for family, case in itertools.product(FAMILIES, cases):
        only_in_full = case in IN_FULL if family == FAMILIES[0] else case not in OF_SD3
        yield pytest.param(family, case, marks=pytest.mark.full if only_in_full else ())


def of_every_family(*cases: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("family", "case"), list(of_families(cases)))


@pytest.fixture(scope="module")
def skip(request) -> list[str]:
    every = (*LIKE_NATIVE, *OTHER_MODES, IN_TURN, AGAIN, *HOOKS, *BYPASS, *WEIGHTS, *SAVED)
    skip = unselected(request, "family", "case", of=itertools.product(FAMILIES, every))
    skip += unselected(request, "family", "refused", of=itertools.product(FAMILIES, REFUSED))
    return skip + unselected(request, "enlarged", of=zip(ENLARGED))


@pytest.fixture(scope="module")
def found(inside, skip):
    return inside.run("lora", skip=skip)[0]


def check(got, measured, case):
    assert "error" not in got, got
    measured(f"LoRA, largest difference to ComfyUI's own, {case}", got["difference"])
    assert got["difference"] <= LIMIT


@of_every_family(*LIKE_NATIVE)
def test_equals_the_native_model_with_the_same_file(found, measured, family, case):
    check(found[f"{family}, {case}"], measured, f"{family} {case}")
    assert found[f"{family}, {case}"]["moved"] > 0.1


@of_every_family(*OTHER_MODES)
def test_other_places_and_modes(found, measured, family, case):
    check(found[f"{family}, {case}"], measured, f"{family} {case}")


def test_convolution_with_a_third_factor(found, measured):
    check(found["SD3, LoCon with a third factor"], measured, "SD3 LoCon")
    assert found["SD3, LoCon with a third factor"]["moved"] > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["names and shapes", "LoRA names"])
def test_weights_have_the_names_that_the_native_model_gives_them(found, family, what):
    got = found[f"{family}, {what}"]
    assert got.get("same"), got
    assert got["count"] > 50


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_elsewhere_are_not_counted_as_memory(found, family):
    got = found[f"{family}, memory"]
    assert got["bytes"] < 1e5 < got["native"], got


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ["removed", "after the refusals"])
def test_nothing_is_left_of_a_lora_that_was_removed(found, family, case):
    assert found[f"{family}, {case}"].get("difference") == 0.0, found[f"{family}, {case}"]


@of_every_family(IN_TURN)
def test_two_clones_of_one_model_keep_their_own(found, measured, family, case):
    got = found[f"{family}, {case}"]
    check(got, measured, f"{family} {case}")
    assert got["repeat"] == 0.0
    assert got["apart"] > 0.1


@of_every_family(AGAIN)
def test_ranks_that_were_started_again_get_it_again(found, family, case):
    got = found[f"{family}, {case}"]
    assert got.get("difference") == 0.0, got
    assert got["moved"] > 0.1


def test_layers_of_another_size_are_left_out_and_said(found, measured):
    parts = [got for case, got in found.items() if case.startswith("left out ") and "kinds" in got]
    assert sum(len(got["kinds"]) for got in parts) == 11
    for got in parts:
        check(got, measured, f"left out: {', '.join(got['kinds'])}")
        assert f"Parallel DiT: {len(got['kinds'])} of " in got["told"][0]
        assert "layers of this LoRA do not fit this model and are left out" in got["told"][0]


@pytest.mark.parametrize("case", ["left out part", "left out part, tensor_parallel_degree 2"])
def test_a_part_of_a_fused_layer_is_left_out(found, measured, case):
    check(found[case], measured, case)


@pytest.mark.parametrize("enlarged", mostly_full(ENLARGED, ENLARGED[:3]))
def test_a_lora_that_enlarges_the_first_layer_equals_the_native_model(found, measured, enlarged):
    """As Black Forest Labs' for depth and canny. A LoRA for the smaller layer behind it is left out there."""
    check(found[enlarged], measured, enlarged)
    assert found["enlarging"]["moved"] > 0.1
    assert found["enlarging and not"]["difference"] == 0.0


@pytest.mark.parametrize("kind", SAID)
def test_what_the_ranks_cannot_add_is_refused_by_name(found, kind):
    got = found[f"refusal {kind}"]
    assert isinstance(got, dict), got
    assert got["error"].startswith("ValueError: model: "), got
    assert SAID[kind] in got["error"]


HOOKS = (
    *("hook of one prompt", "a hook for each", "two hooks together", "keyframes", "keyframes of whole differences"),
    *(
        "hook with a layer of another size",
        "hook of a region",
        "hook of a model",
        "hooks beside a LoRA",
        "hooks beside a LoRA in bypass mode",
    ),
    "hooks under PipeFusion",
)
BYPASS = (
    *("bypass of LoRA", "bypass of differences", "bypass of LoHa", "bypass of LoKr", "bypass of DoRA"),
    *("bypass beside a LoRA", "bypass once more"),
)


REFUSED = {
    "refusal of OFT": "OFT in bypass mode, which turns the layer's output,",
    "refusal of another size": "a LoRA in bypass mode for",
    "refusal of enlarging in bypass mode": "a LoRA in bypass mode for",
    "refusal of enlarging in a hook": "LORA that enlarges the weight, in a conditioning (a hook),",
    "refusal of DoRA in a hook": "LORA in a conditioning (a hook), where it would be worked out anew for each call,",
}


@pytest.fixture(scope="module")
def hooked(request, inside, skip):
    further = [f"SD3, {case}" for case in ("sent", "hooks gone")] if "SD3" not in families(request, "hooked") else []
    return inside.run("lora_hooks", skip=[*skip, *further])[0]


def families(request, fixture: str) -> list[str]:
    """Those of the selected tests that take this fixture."""
    ours = [item for item in request.session.items if item.path == request.path and fixture in item.fixturenames]
    wanted = {item.callspec.params.get("family") for item in ours if hasattr(item, "callspec")}
    return [family for family in FAMILIES if family in wanted]


@of_every_family(*HOOKS, *BYPASS)
def test_hooks_and_bypass_equal_the_native_model(hooked, measured, family, case):
    check(hooked[f"{family}, {case}"], measured, f"{family} {case}")
    assert hooked[f"{family}, {case}"]["moved"] > 0.05


def test_bypass_of_a_convolution(hooked, measured):
    check(hooked["SD3, bypass of a convolution"], measured, "SD3 bypass of a convolution")


@FAMILY
def test_hooks_that_are_gone_are_on_the_ranks_no_more(hooked, family):
    assert hooked[f"{family}, hooks gone"] == 0.0


def test_a_bypass_that_was_taken_away_is_on_the_ranks_no_more(hooked):
    assert hooked["Flux, bypass gone"] == 0.0


@FAMILY
def test_factors_of_hooks_are_sent_once(hooked, family):
    got = hooked[f"{family}, sent"]
    assert got["once"] == got["twice"] == 1, got
    assert got["weighed"] >= 2 * 2 * 4, got  # two ranks, two prompts, four steps


@FAMILY
@pytest.mark.parametrize("refused", REFUSED)
def test_hooks_and_bypass_that_are_refused(hooked, family, refused):
    got = hooked[f"{family}, {refused}"]
    assert got["error"].startswith("ValueError: model: "), got
    assert REFUSED[refused] in got["error"]


WEIGHTS = (
    *("merge", "merge of ours into the native", "merge of the native into ours", "merge with LoRAs", "merge by blocks"),
    *("subtracted and added", "DoRA", "OFT", "BOFT", "GLoRA", "set", "factors", "merge over tensor_parallel_degree 2"),
)
SAVED = ("ModelSave", "ModelSave of a merge", "LoraSave", "LoraSave of whole differences")


@pytest.fixture(scope="module")
def merged(request, inside, skip):
    return inside.run("merges", families=families(request, "merged"), skip=skip)[0]


@of_every_family(*WEIGHTS)
def test_what_depends_on_the_weights_equals_the_native_model(merged, measured, family, case):
    check(merged[f"{family}, {case}"], measured, f"{family} {case}")
    assert merged[f"{family}, {case}"]["moved"] > 0.05


@FAMILY
def test_the_files_weights_are_back_after_a_merge(merged, family):
    assert merged[f"{family}, removed"].get("difference") == 0.0, merged[f"{family}, removed"]


@of_every_family(*SAVED)
def test_saved_files_are_those_of_the_native_model(merged, family, case):
    got = merged[f"{family}, {case}"]
    assert got.get("keys") == got.get("same") > 10, got


def test_a_quantised_file_is_not_merged_or_saved(merged):
    for what in ("saving", "merging"):
        got = merged[f"refusal of {what}"]
        assert got["error"].startswith(f"ValueError: model: {what}"), got
        assert "Load the model with a native loader" in got["error"]
