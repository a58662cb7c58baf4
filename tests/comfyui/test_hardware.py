"""On cards that are not here the pack computes in what ComfyUI computes in, and says what it cannot run on."""

import pytest

from testing import fake_cuda

pytestmark = pytest.mark.comfyui

CARDS = [name for name, card in vars(fake_cuda).items() if isinstance(card, fake_cuda.Card)]


@pytest.mark.parametrize("card", CARDS)
def test_files_are_computed_in_what_comfyui_would(found, card):
    """But for a file in a dtype that both the card and the model can be computed in: that one stays, where ComfyUI takes the
    one that it likes best (Wan's bf16 files in fp16)."""
    got = found[card]
    halves, by_torch = got.pop("halves")
    assert by_torch == halves
    for what, (theirs, ours, stays) in got.items():
        assert ours == (what.split()[-1] if stays else theirs), what
        assert ours in (*halves, "fp32")


def test_attention_auto_is_what_comfyui_was_started_with(found):
    chosen = found["attention"]
    said = {name: words for name, (_, *words) in chosen.items()}
    assert {name: took for name, (took, *_) in chosen.items()} == {
        "as started": "auto",  # on a CPU: nothing that anybody chose
        "pytorch": "auto",
        "flash": "auto/flash",
        "sage": "auto",
        "xformers": "auto/xformers",
        "comfy_kitchen_int8": "auto/comfy_kitchen",
        "split": "auto",
        "sub_quad": "auto",
        "new": "auto",
    }
    assert {name for name, words in said.items() if words} == {"sage", "split", "sub_quad", "new"}
    assert said["sage"][0].startswith(
        "Parallel DiT: ComfyUI computes attention by SageAttention, but ranks use torch's SDPA"
    )
    assert said["split"][0] == "Parallel DiT: the ranks do not have ComfyUI's attention 'split' and use torch's SDPA"


def test_what_this_comfyui_runs_on_and_how_it_was_started(found):
    assert found["host"] == ["cpu", None, []]
    assert found["hidden"].startswith(
        " ComfyUI was started with --cuda-device 0, which hides all other GPUs: restart it with --cuda-device all"
    )


@pytest.mark.parametrize(("kind", "what"), [("mps", "an Apple GPU"), ("xpu", "an Intel GPU")])
def test_the_loader_refuses_what_it_has_no_ranks_on(found, kind, what):
    error = found.error(f"loader on {kind}")
    assert error.startswith(f"ValueError: devices: ComfyUI runs on {what}")
    error = found.error("loader on cuda")
    assert error.startswith("ValueError: devices: Write cpu,cpu into devices")
    assert "pipefusion_degree 2 needs 2 GPUs, but ComfyUI shows 0 on this machine" in error


def test_the_menus_command_is_told_what_becomes_of_each_loader(found):
    takes = {"takes": True, "file": "tiny.safetensors", "weights": 32321792}
    devices, why, *plans = found["menu"]
    assert not why
    assert devices == 2
    unknown = {"why": "its model file is unknown"}
    refused = plans.pop(2)
    assert refused.pop("why").startswith("vae.safetensors is not a diffusion transformer that this version knows")
    assert refused == {"file": "vae.safetensors"}
    assert plans == [takes, takes, unknown, unknown, unknown, {"parallel": True}]


def test_the_menus_command_puts_apply_pipefusion_where_exact_modes_are_slow(found):
    assert "pipefusion" not in found["menu"][2]
    assert found["menu, small cards"][2]["pipefusion"] == "no GPU holds the whole model"
    assert found["menu, no P2P"][2]["pipefusion"] == "the GPUs have no direct link (P2P)"
    devices, why, *_ = found["menu, one card"]
    assert (devices, why.split(".")[0]) == (1, "ComfyUI shows one GPU on this machine")


def test_the_menus_route_takes_short_json_of_loaders_alone(found):
    *refused, read = found["menu's requests"]
    assert len(refused) == 13 and all(text.startswith("loaders: ") for text in refused), refused
    assert read == "taken"
