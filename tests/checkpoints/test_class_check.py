"""A checkpoint that its class cannot compute is refused on the client, by the file's name, before a rank starts."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints import checkpoint as opening
from parallel_backend.checkpoints import class_check
from parallel_backend.checkpoints.checkpoint import open_checked, open_checkpoint
from parallel_backend.checkpoints.stand_in_values import StandInValues
from parallel_backend.families import FAMILIES
from testing import real_sizes, tiny
from testing.cases import all_cases

DAMAGED = {
    "ltx-2": {"audio_cross_attention_dim": None},
    "minimax-h3": {"rope_freq_dim": 4},
}
"""Case -> settings that only its class shows to be wrong. Most are of forwards that look at values of tensors."""
REAL = real_sizes.REAL_MODELS


@pytest.fixture
def folder(tmp_path, flux_model):
    """`folder(**settings)`: the tiny Flux as a diffusers folder with other settings."""

    def make(**settings):
        path = tmp_path / "folder"
        path.mkdir(exist_ok=True)
        save_file(dict(flux_model.state_dict()), path / "a.safetensors")
        (path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel", **tiny.FLUX, **settings}))
        return path

    return make


SETTINGS = {
    "a wider head": ({"attention_head_dim": 32}, r"of shape \[128, 256\], where flux has \[256, 256\]|cannot be computed"),
    "fewer heads": ({"num_attention_heads": 4}, "where flux has|cannot be computed"),
    "patches": ({"patch_size": 2}, "cannot be computed"),
    "other channels": ({"in_channels": 128}, r"x_embedder.weight of shape \[128, 64\], where flux has \[128, 128\]"),
    "other output": ({"out_channels": 60}, r"proj_out.weight of shape \[64, 128\], where flux has \[60, 128\]"),
    "axes that make more than a head": ({"axes_dims_rope": [8, 6, 6]}, "cannot be computed .*RuntimeError"),
    "axes that make less than a head": ({"axes_dims_rope": [4, 6, 4]}, "cannot be computed .*RuntimeError"),
    "an axis less": ({"axes_dims_rope": [4, 6]}, "cannot be computed .*IndexError"),
    "wider text": ({"joint_attention_dim": 48}, r"context_embedder.weight of shape \[128, 24\], where flux has \[128, 48\]"),
    "no channels": ({"patch_size": 0}, "where flux has|cannot be computed"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_end_a_rank_are_refused_before_one_starts(folder, case):
    settings, words = SETTINGS[case]
    path = folder(**settings)
    assert open_checked(path).family.name == "flux", "it is within all bounds"
    with pytest.raises(ValueError, match=rf"^model_name: folder (holds|has).*({words})"):
        open_checkpoint(path)


def test_an_output_wider_than_the_latent_is_no_latent(flux_file, tmp_path):
    tensors, path = load_file(flux_file), tmp_path / "wide.safetensors"
    for leaf in ("weight", "bias"):
        key = f"final_layer.linear.{leaf}"
        tensors[key] = torch.cat((tensors[key], tensors[key]))
    save_file(tensors, path)
    with pytest.raises(
        ValueError, match=r"^model_name: wide.safetensors has .* it makes \[1, 16, 128\] of tokens \[1, 16, 64\]"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("key", ["double_blocks.0.img_attn.proj.weight", "double_blocks.0.img_mlp.0.bias", "txt_in.weight"])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_ranks_cut_has_the_sides_of_its_layer(flux_file, tmp_path, key, axis):
    """A size of one may be missing from other tensors, or be one too many. A cut would take the wrong side here."""
    tensors, path = load_file(flux_file), tmp_path / "more.safetensors"
    tensors[key] = tensors[key].unsqueeze(axis)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"^model_name: more.safetensors (holds|is).*({key}|do not fit)"):
        open_checkpoint(path)
    assert class_check.fits((64,), (1, 64), flat=False, whole=False)
    assert not class_check.fits((64,), (1, 64), flat=False, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_class_takes_its_own_checkpoint(monkeypatch, tmp_path, case):
    ran = []
    monkeypatch.setattr(class_check, "_run", lambda *each, run=class_check._run: ran.append(run(*each)))
    class_check._class_shapes.cache_clear()
    open_checkpoint(case.save(case.model(), tmp_path / "model.safetensors"))
    assert ran


@pytest.mark.parametrize("name", DAMAGED)
def test_a_setting_that_only_the_class_refuses_is_an_error_with_the_files_name(tmp_path, name):
    case = next(case for case in all_cases() if case.name == name)
    case.save_folder(case.model(), path := tmp_path / "model")
    open_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    assert DAMAGED[name].keys() <= config.keys()
    (path / "config.json").write_text(json.dumps(config | DAMAGED[name]))
    with pytest.raises(ValueError, match=r"^model_name: model has a configuration with which .* cannot be computed"):
        open_checkpoint(path)


def test_values_that_are_asked_for_are_ones():
    with torch.device("meta"), StandInValues():
        tensor = torch.zeros(2, 3)
        assert tensor[0, 0].item() == 1.0 and tensor[0].tolist() == [1.0] * 3 and bool(tensor[0, 0])
        assert int(torch.zeros((), dtype=torch.int64)) == 1
        for copy in (tensor.cpu(), tensor.to("cpu"), tensor.to(device=torch.device("cpu"), dtype=torch.int64)):
            assert copy.sum().item() == 6 and not copy.is_meta
            assert (copy * tensor).is_meta and torch.cat((tensor, copy)).shape == (4, 3)
        assert tensor.long().flatten().bincount().cpu().tolist() == [6]
        with pytest.raises(RuntimeError):
            tensor.cpu() @ tensor


@pytest.mark.parametrize("name", REAL)
def test_published_sizes_are_taken(tmp_path, name):
    open_checkpoint(REAL[name].save(tmp_path / "model.safetensors"))


def test_torchs_generator_stays_where_it_is(flux_file):
    class_check._class_shapes.cache_clear()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    open_checkpoint(flux_file)
    assert torch.equal(before, torch.get_rng_state()), "a sampler's noise would be another one"


def test_other_threads_build_their_modules_as_ever(flux_file, monkeypatch):
    """ComfyUI loads an encoder while its server asks for a plan."""
    made = []

    def elsewhere():
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 2).weight.device.type))
        thread.start()
        thread.join()
        return type(FAMILIES["flux"]).transformer_class(FAMILIES["flux"])

    class_check._class_shapes.cache_clear()
    monkeypatch.setitem(FAMILIES["flux"].__dict__, "transformer_class", elsewhere)
    open_checkpoint(flux_file)
    assert made == ["cpu"]


def test_a_rank_does_not_build_the_class_twice(flux_file, monkeypatch):
    monkeypatch.setattr(opening, "check_class", lambda *_: pytest.fail("the client has done it"))
    open_checked(flux_file)
