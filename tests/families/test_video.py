"""What is peculiar to video: bands of rows or of frames, conditioning that does not fit."""

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.core.degrees import Degrees
from parallel_backend.families import FAMILIES
from parallel_backend.families.wan_animate_2 import PROMPT
from testing import tiny
from testing.cases import wan_animate_2

pytestmark = pytest.mark.threads

CASES = {case.name: case for case in wan_animate_2.CASES}
MODES = [Degrees(pipe=2), Degrees(ulysses=2), Degrees(tensor=2), Degrees(patch=2, patch_mode="displaced")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(case)`: (diffusers' model, its single file)."""
    base, known = tmp_path_factory.mktemp("video"), {}

    def save(case):
        if case.name not in known:
            model = case.model()
            known[case.name] = model, case.save(model, base / f"{case.name}.safetensors")
        return known[case.name]

    return save


def calls_in_bands(model, patching, given, changed):
    """The output of a call in bands at the latent of the exact call before it, times `changed`."""
    x, timestep, tensors = given
    rows = cut_rows(tuple(x.shape), 1 if model.degrees.displaced else 3, patching)
    assert model.degrees.displaced or len(rows) > 1
    run = BandedRun(model, rows, tuple(x.shape), warm_up=True, extrapolate=False, along=patching.along)

    def sample(band):
        own = patching.rows(x, rows[band])
        run.predict(band, ModelCall(own, timestep, tensors), exact=True)
        return run.predict(band, ModelCall(own * changed, timestep, tensors), exact=False)

    parts = run_bands(run, sample, lambda: None, lambda: None)
    model.close_run(run.run, lambda: None)
    return torch.cat(parts, patching.band_dim)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("wan-animate-2", degrees) for degrees in MODES],
    ids=str,
)
@pytest.mark.parametrize("along", [pytest.param("rows", marks=pytest.mark.full), "frames"])
def test_bands_of_a_video_whose_old_keys_are_still_true_are_exact(name, degrees, along, pools, saved, measured):
    case = CASES[name]
    model, file = saved(case)
    given, patching = case.inputs(latent=case.odd or case.latent), case.row.patching.cut(along)
    assert given[0].shape[2] > 1
    remote = pools.load(file, degrees)
    with torch.inference_mode():
        expected = case.reference(model, *given)
    error = tiny.relative(calls_in_bands(remote, patching, given, 1.0), expected)
    measured(f"relative error of bands with true old keys, {name}", error)
    assert error <= 1e-5
    changed = calls_in_bands(remote, patching, given, 1.1)
    with torch.inference_mode():
        expected = case.reference(model, given[0] * 1.1, *given[1:])
    assert tiny.relative(changed, expected) > 1e-4


def test_wan_says_what_its_text_and_picture_must_be():
    text, case = torch.zeros(1, PROMPT, 24), CASES["wan-animate-2"]
    conditioning, config = case.row.inputs.conditioning, case.config
    with pytest.raises(ValueError, match=r"^positive, negative: Wan needs text conditioning"):
        conditioning(config, {})
    assert conditioning(config, {"context": torch.zeros(1, 600, 24)})["context"].shape[1] == 2 * 600, "in its place too"
    with pytest.raises(ValueError, match="CLIP vision output has tokens of 1024, this model needs 1280"):
        conditioning(config, {"context": text, "clip_fea": torch.zeros(1, 257, 1024)})


@pytest.mark.parametrize(
    ("family", "tensors"),
    [
        ("wan-animate-2", {"pose": torch.zeros(1, 16, 4, 12, 10)}),  # as many frames as the video, whose first has none
    ],
)
def test_what_is_not_of_the_latents_size_is_refused(family, tensors):
    with pytest.raises(ValueError, match=r"^positive, negative: the .* is made for a latent of .*, the latent_image takes"):
        FAMILIES[family].inputs.check_grid((4, 6, 5), tensors)


@pytest.mark.parametrize("words", [256, 1024])
@pytest.mark.parametrize("name", ["wan-animate-2"])
def test_wan_with_a_picture_takes_prompts_of_any_length(pools, saved, name, words):
    """A prompt with each token twice is to attention as the prompt itself. diffusers' class takes 512 tokens alone."""
    case = CASES[name]
    model, path = saved(case)
    x, timestep, tensors = case.inputs()

    def of_length(count):
        shorter, *times = (256, count // 256)
        return {
            key: torch.cat([each[:, :shorter].repeat_interleave(*times, 1) for each in text.split(PROMPT, 1)], 1)
            if key.endswith("context")
            else text
            for key, text in tensors.items()
        }

    on_ranks = pools.load(path, Degrees(tensor=2))
    found = on_ranks.predict(ModelCall(x, timestep, of_length(words)), lambda: None)
    assert tiny.relative(found, case.reference(model, x, timestep, of_length(PROMPT))) < 1e-5
