"""The pack's modules on a stand-in for ComfyUI, and a MODEL on ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.support.stand_in_comfyui import KSAMPLER, CFGGuider, NativeFlux, pack


@pytest.fixture(scope="module")
def module() -> Iterator[Callable[[str], Any]]:
    """`module(name)`: the pack's module nodes.<name>."""
    with pack() as module:
        yield module


@pytest.fixture
def patcher(module, mini_file, monkeypatch) -> Any:
    """A MODEL on ranks, which are not started."""
    checkpoint = mini.opened(mini_file)
    weights = module("model.lora.lora").NativeWeights(checkpoint, checkpoint.built.own, torch.float32)
    setup = mini.setup(checkpoint.path, "fp32", ("cpu",), Degrees(), "auto")
    model = torch.nn.Module()
    model.model_loaded_weight_memory, model.latent_shapes = 0, None
    stub = module("model.call.diffusion_model").RemoteDiffusionModel
    model.diffusion_model = stub(checkpoint, setup, setup.devices, True, weights)
    vars(model.diffusion_model)["native"] = NativeFlux  # runs wrappers
    return module("model.patcher").RemoteModelPatcher(model, torch.device("cpu"))


@pytest.fixture
def sampling(module, patcher) -> Callable[..., Any]:
    """`sampling(options, entry, mask)`: one of the MODEL by ComfyUI's own guider and sampler, as bands look at it.

    `options`: further model_options. `entry`: further entries of the conditioning.
    """

    def make(options: dict | None = None, entry: dict | None = None, mask: torch.Tensor | None = None) -> Any:
        patcher.model_options |= options or {}
        guider = CFGGuider(patcher)
        guider.conds = {"positive": [{"model_conds": {}} | (entry or {})]}
        sampler, sigmas, noise = KSAMPLER(euler), torch.linspace(1, 0, 3), torch.zeros(1, 16, 8, 8)
        return module("sampling.eligibility").Sampling(sampler, guider, sigmas, {}, None, noise, None, mask, True)

    return make


@pytest.fixture
def why_not_banded(module, sampling) -> Callable[..., str | None]:
    """`why_not_banded(...)`: the reason why such a `sampling` is not cut into bands."""
    return lambda *given, **named: module("sampling.eligibility").why_not_banded(sampling(*given, **named))


def euler() -> None:
    """A sampler of ComfyUI's."""


euler.__module__ = "comfy.k_diffusion.sampling"
