"""The trial of a class: what it proves, and that it sees what would be wrong on ranks."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.core.spans import Span
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import (
    LATENTS,
    from_tensors,
    in_form,
    structure_of,
    timestep_of,
    to_tensors,
    unpack,
)
from parallel_backend.own_class.calls.tried_calls import Call, draw_weights, smaller
from parallel_backend.own_class.cuts import stages
from parallel_backend.own_class.cuts.stages import StageBlocks, crossing
from parallel_backend.own_class.plans.block_order import block_lists
from parallel_backend.own_class.trials.short_model import short_model
from parallel_backend.own_class.trials.trial import trial
from parallel_backend.quickstart.model import mini_flux
from tests.support.planted_comfyui import planted as own

pytestmark = pytest.mark.usefixtures("comfyui")


def call(batch: int = 2, **options) -> Call:
    g = torch.Generator().manual_seed(0)
    x, context = torch.randn(batch, 4, 2, 4, 6, generator=g), torch.randn(batch, 5, 16, generator=g)
    return Call(x, torch.full((batch,), 700.0), {"context": context, "control": None}, options)


TIMES = 900.0, 500.0, 1.0
"""Of a run: LATE is between the last two."""


@pytest.mark.parametrize("name", ["Right", "InPlace", "Registers", "PadsArgument"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_can_be_shared_out_is_proven(name, batch):
    proof = trial(own(name), call(batch), TIMES)
    assert (proof.stages, proof.batch) == ("", "")
    assert [block.name for block in proof.blocks][-4:] == [f"blocks.{index}" for index in range(4)]


def test_long_skips_go_to_the_stages_that_read_them():
    proof = trial(own("LongSkips"), call(), TIMES)
    assert (proof.stages, proof.sequence) == ("", "")
    until = {block.name: block.until for block in proof.blocks if block.until}
    assert until == {"blocks.0": "blocks.7", "blocks.1": "blocks.6", "blocks.2": "blocks.5"}
    found = [crossing(proof.blocks, at) for at in range(1, 8)]
    assert found == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 6]]
    assert len(short_model(own("LongSkips"), call(), lambda *_: None).kept["blocks"]) == 6


@pytest.mark.parametrize("name", ["PoolsBatch", "PoolsBatchLate"])
def test_entries_that_look_at_each_other_stay_together(name):
    proof = trial(own(name), call(), TIMES)
    assert proof.batch.startswith("a single entry of a batch gives a different result")
    assert proof.stages == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("HiddenSkipLate", "stages give a different result"),
        ("ScaledSkips", "stages give a different result"),
        ("SkipsBlockLate", "blocks.2 ran as block 2, and as 3 in the trial"),
        ("OtherOrder", "its blocks do not run list by list"),
        ("Twice", "a block runs more than once in a call"),
        ("KeepsFirst", "it keeps results of earlier calls, which another LoRA would make wrong"),
        ("CountsToTen", "it keeps calls from call to call"),
        ("CountsCalls", "the same call gives a different result the second time"),
        ("WritesArgument", "it writes into its argument x, but a rank has only a copy"),
        ("WritesTime", "it writes into its argument context, but a rank has only a copy"),
        ("ReturnsKeys", "its block blocks.0 returns a value whose shape matches none of its arguments"),
    ],
)
def test_what_stages_would_get_wrong_is_not_proven(name, why):
    assert trial(own(name), call(), TIMES).stages.startswith(why)


@pytest.mark.parametrize(
    "name", ["Tokens", "SharedKeys", "Crossed", "TwoStreams", "MasksKeys", "OnAxes", "Between", "ChangingWords"]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_that_can_be_cut_are_proven(name, batch):
    proof = trial(own(name), call(batch), TIMES)
    assert (proof.stages, proof.batch, proof.sequence) == ("", "", "")
    assert all(call.heads == 4 for block in proof.blocks for call in block.attention)
    assert len(proof.blocks) == sum(map(len, block_lists(build(own(name))).values()))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PlainAttention", "its attention cannot be reached"),
        ("PoolsTokens", "blocks.1 attends to different values if its tokens are cut"),
        ("NumbersTokens", "blocks.0 attends to different values if its tokens are cut"),
        ("Masked", "its attention has a mask that is not a mask of keys"),
        ("Biased", "blocks.0 attends with a mask whose values"),
        ("TwiceInBlockLate", "blocks.0 attends more often than in the trial"),
        ("ReadsAllTokens", "cut tokens give a different result"),
        ("PoolsEachFrame", "blocks.1 attends to different values if its tokens are cut"),
        ("SharesKeysEarly", "blocks.0 attends with heads that share no keys"),
        ("PrefixAsItIs", "transformer_blocks.0 attends"),
        ("CountsRows", "blocks.0 attends differently for each row if its tokens are cut"),
    ],
)
def test_what_sequence_ranks_would_get_wrong_is_not_proven(name, why):
    assert trial(own(name), call(), TIMES).sequence.startswith(why)


@pytest.mark.parametrize("name", ["PoolsBetweenLate", "ComparesBetween", "FirstTokenBetween", "ReadsItBehindAll"])
def test_what_mixes_tokens_between_blocks_is_not_proven(name):
    assert trial(own(name), call(), TIMES).sequence


def test_a_text_of_a_fixed_length_is_tried_whole():
    given = call()
    text = torch.randn(len(given.x), 12, 16, generator=torch.Generator().manual_seed(1))
    proof = trial(own("TextInFull"), replace(given, named={**given.named, "context": text}), TIMES, bands=True)
    assert (proof.stages, proof.batch, proof.sequence, proof.bands) == ("", "", "", "")


def nested(batch: int) -> Call:
    """A video of 48 tokens and a sound of ten, each at a time of its own."""
    g, given = torch.Generator().manual_seed(1), call(batch)
    latents = [given.x, torch.randn(batch, 3, 2, 10, generator=g)]
    x, timestep, told = in_form(latents, (given.timestep, given.timestep / 2), 5)
    return Call(x, timestep, {**given.named, **told})


def test_a_prompt_as_long_as_the_image_is_told_apart_from_it():
    """An image of 8 x 8 has 16 tokens."""
    text = {"context": torch.ones(1, 16, 32), "pooled": torch.ones(1, 24), "control": None}
    found = trial(
        mini_flux(double_blocks=2, pooled_width=24), Call(torch.ones(1, 16, 8, 8), torch.ones(1), text), (0.5,), bands=True
    )
    assert (found.sequence, found.bands) == ("", "")


@pytest.mark.parametrize(("name", "batch"), [("SoundToo", 1), ("Pairs", 2)])
def test_nested_latents_are_proven_in_one_row(name, batch):
    given, model = nested(batch), build(own(name))
    proof = trial(own(name), given, TIMES)
    assert (proof.stages, proof.batch, proof.sequence) == ("", "", "")
    draw_weights(model, 0)
    whole = model(given.latents, given.times, given.named["context"])
    assert all(map(torch.equal, unpack(given.run(model), given.named[LATENTS]), whole))


def test_what_goes_with_a_latent_is_made_smaller_with_it():
    """Another latent of one frame, and a camera's rays for each pixel; text as wide as a picture stays."""
    given, plain = call(), torch.zeros(2, 4, 2, 4, 6)
    others = {"frame": plain[:, :, :1], "rays": torch.zeros(2, 6, 2, 32, 48), "text": torch.zeros(2, 32, 48)}
    others["picture"] = torch.zeros(2, 4, 4, 6)
    small = smaller(Call(plain, given.timestep, {**given.named, **others}), 2, 3)
    assert small.x.shape[2:] == (2, 2, 2)
    shapes = {name: tuple(small.named[name].shape) for name in others}
    assert shapes == {"frame": (2, 4, 1, 2, 2), "rays": (2, 6, 2, 16, 16), "text": (2, 32, 48), "picture": (2, 4, 2, 2)}


def test_a_dictionary_of_tensors_is_proven_whatever_its_seed():
    given, g = call(), torch.Generator().manual_seed(1)
    payload = {"gain": torch.randn(2, 1, 16, generator=g), "more": {"bias": torch.randn(16, generator=g)}, "seed": 0}
    proof = trial(own("TakesPayload"), Call(given.x, given.timestep, {**given.named, "payload": payload}), TIMES)
    assert (proof.stages, proof.batch, proof.sequence, proof.numbers) == ("", "", "", ("payload/seed",))


@pytest.mark.parametrize(("name", "free"), [("NumberMatters", ("longest",)), ("Tokens", ("num_tokens", "longest"))])
def test_a_number_of_which_other_values_are_proven_too_is_told(name, free):
    """A new prompt has another length: it is no new trial."""
    given = call()
    counted = Call(
        given.x, given.timestep, {**given.named, "num_tokens": 6, "longest": 6, "is_long": True, "scale": torch.ones(2)}
    )
    proof = trial(own(name), counted, TIMES)
    assert (proof.stages, proof.sequence, proof.numbers) == ("", "", free)
    assert proof.is_of_all(["num_tokens"]) == ("num_tokens" in free)
    assert proof.is_of_all([])


def test_what_is_kept_in_the_options_is_seen():
    assert "writes into its argument cache" in trial(own("WritesOption"), call(cache={"end": 0}), TIMES).stages


def test_an_option_that_ranks_do_not_get_is_seen():
    proof = trial(own("ReadsOption"), call(factor=1.5), TIMES)
    assert proof.stages == proof.batch
    assert proof.stages.startswith("it gives a different result without ComfyUI's transformer_options")
    assert trial(own("ReadsOption"), call(), TIMES).stages == ""


SIGMAS = {"sigmas": torch.tensor([1.0, 1.0]), "sample_sigmas": torch.tensor([1.0, 0.7, 0.004, 0.0])}


def test_the_runs_sigmas_are_told_to_a_class_that_reads_them():
    proof = trial(own("ReadsSigmas"), call(**SIGMAS), (*TIMES, -800.0))  # Cosmos 1 gets logarithms
    assert (proof.stages, proof.batch, proof.sequence, proof.options) == ("", "", "", ("sigmas", "sample_sigmas"))
    assert trial(own("Tokens"), call(**SIGMAS), TIMES).options == ()
    named, times = {"transformer_options": {"words": ["x"], **SIGMAS}}, torch.ones(2)
    tensors = to_tensors(named, times)
    first = from_tensors({name: each[:1] for name, each in tensors.items()}, structure_of(tensors))["transformer_options"]
    assert first["words"] == ["x"]
    assert all(torch.equal(first[name], value) for name, value in SIGMAS.items()), "of all entries"


def test_a_long_skip_in_the_last_step_is_seen():
    assert trial(own("SkipsInLastStep"), call(**SIGMAS), TIMES).stages.startswith("stages give a different result")


def test_a_class_that_does_not_run_is_refused_with_its_error():
    given = call()
    with pytest.raises(
        ValueError, match=r"positive, negative: .*class Right does not run with .* text has width 3. Try another"
    ):
        trial(own("Right"), Call(given.x, given.timestep, {"context": given.named["context"][..., :3]}), ())


def test_a_class_that_host_memory_has_no_room_for_is_not_tried(monkeypatch):
    monkeypatch.setattr("parallel_backend.own_class.trials.short_model.host_memory", lambda: (10_000, 20_000))
    with pytest.raises(ValueError, match="of host memory"):
        trial(own("Right"), call(), TIMES)


def test_the_generator_of_noise_is_left_as_it_is():
    before = torch.get_rng_state()
    trial(own("Registers"), call(), TIMES)
    assert torch.equal(before, torch.get_rng_state())


class Planted:
    """A link between two stages, with a fault."""

    def __init__(self, fault: str):
        self.fault, self.sent = fault, []

    def send(self, tensor):
        self.sent.append(tensor if self.fault == "no copy" else tensor.clone())

    def receive(self, wanted):
        left_out = self.fault == "left out"
        return [torch.full(shape, torch.nan, dtype=dtype) if left_out else self.sent.pop(0) for shape, dtype in wanted]


def two_stages(name: str, fault: str, given: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the whole model and of two stages of it."""
    from parallel_backend.own_class.built.building import build

    model, link = build(own(name)), Planted(fault)
    draw_weights(model, 0)
    with torch.no_grad():
        whole, blocks = given.run(model), trial(own(name), given, ()).blocks
        for span in (Span(0, 2), Span(2, 4)):
            stage = StageBlocks(model, blocks, span, link)
            out = given.run(stage.call)
            stage.close()
    return whole, out


def test_a_cut_that_is_left_out_gives_nothing_finite():
    whole, out = two_stages("Right", "left out", call())
    assert whole.isfinite().all()
    assert not out.isfinite().any()


def test_a_stand_in_that_does_not_copy_would_be_wrong(monkeypatch):
    """Why stand-ins return fresh tensors: the class adds to what they return, which would be its own input."""
    whole, out = two_stages("InPlace", "", call())
    assert torch.equal(whole, out)
    monkeypatch.setattr(stages.torch, "full_like", lambda like, _value: like)
    assert "stages give a different result" in trial(own("InPlace"), call(), ()).stages


def test_arguments_survive_the_way_to_the_ranks():
    shared, own_rows = torch.arange(6).view(2, 3)[:1].expand(5, 3), torch.randn(2, 3)
    arguments = {"a": own_rows, "b": [shared, None, 2, "x", [own_rows]], "c": True, "d": torch.tensor(3.0)}
    arguments |= {"e": {"of": {"more": own_rows}, "tensor": 4}}
    times = torch.rand(2)
    tensors = to_tensors(arguments, times.bfloat16())
    assert all(len(tensor) == 2 for tensor in tensors.values())
    second = from_tensors({name: tensor[1:] for name, tensor in tensors.items()}, structure_of(tensors))
    assert torch.equal(second["a"], own_rows[1:])
    assert torch.equal(second["b"][0], shared)
    assert second["b"][1:4] == [None, 2, "x"]
    assert torch.equal(second["b"][4][0], own_rows[1:])
    assert (second["c"], float(second["d"])) == (True, 3.0)
    assert torch.equal(second["e"]["of"]["more"], own_rows[1:]) and second["e"]["tensor"] == 4
    assert set(second) == set(arguments)
    assert timestep_of(times, structure_of(tensors)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="its call has e/f, a object"):
        to_tensors({"e": {"f": object()}}, times)
