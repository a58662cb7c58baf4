"""ComfyUI is asked to make room on its GPU for ranks: its idle models go, and all that are in use or on ranks stay."""

from types import SimpleNamespace

import pytest
import torch

GB = 10**9
GPU = torch.device("cuda:0")


def loaded(size: float, used: bool = False, on_ranks: bool = False) -> SimpleNamespace:
    """An entry of ComfyUI's list of loaded models."""
    return SimpleNamespace(device=GPU, size=size, currently_used=used, model=SimpleNamespace(on_ranks=on_ranks))


@pytest.fixture
def comfyui(module, monkeypatch):
    """(`make_room`, ComfyUI's loaded models, what it was asked for) on a GPU with 1 GB free."""
    room, models, asked, free = module("model.run.make_room"), [], [], [1.0 * GB]

    def free_memory(required, device, keep_loaded):
        asked.append((required, device))
        for each in [each for each in models if each not in keep_loaded and free[0] < required]:
            models.remove(each)
            free[0] += each.size

    management = room.comfy.model_management
    for name, value in {
        "current_loaded_models": models,
        "get_torch_device": lambda: GPU,
        "extra_reserved_memory": lambda: 0.5 * GB,
        "free_memory": free_memory,
        "soft_empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(management, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _gpu: (free[0], 24 * GB))
    return room.make_room, models, asked


def test_an_idle_model_goes_and_all_others_stay(comfyui):
    make_room, models, asked = comfyui
    in_use, on_ranks = loaded(2 * GB, used=True), loaded(0.0, on_ranks=True)
    models += [in_use, loaded(3 * GB), on_ranks]
    assert make_room("cuda:0", 2 * GB) == 3 * GB
    assert asked == [(3.5 * GB, GPU)]  # with that which is free, and ComfyUI's reserve
    assert models == [in_use, on_ranks]
    assert make_room("cuda:0", 9 * GB) == 0, "nothing is idle"


def test_another_gpu_is_left_alone(comfyui):
    make_room, _, asked = comfyui
    assert make_room("cuda:1", GB) == 0
    assert asked == []
