"""A PDD acceleration LoRA of MiniMax H3: a bank of output heads, of which each step takes the mean over what it spans."""

import types

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.band_cut import packed
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.families.base.patching import latents_of
from testing import tiny
from testing.cases import minimax_h3
from tests.support.stand_in_comfyui import LoRAAdapter

pytestmark = pytest.mark.threads

CASE = minimax_h3.CASES[0]
HEADS, RANK = 8, 3
SHIFTS = {"video": 12.0, "audio": 3.0}


def grid(shift):
    """Sigmas at the borders of the heads' parts."""
    even = torch.linspace(1, 0, HEADS + 1, dtype=torch.float64)
    return shift * even / (1 + (shift - 1) * even)


def lora(state):
    """For both output layers, weights and biases, with the rows of all heads."""
    g, patches = torch.Generator().manual_seed(4), {}
    for stream in SHIFTS:
        for leaf in ("weight", "bias"):
            shape = state[f"final_layer.{stream}_out.{leaf}"].shape
            rows, columns = HEADS * shape[0], shape[1:].numel()
            up, down = torch.randn(rows, RANK, generator=g), torch.randn(RANK, columns, generator=g) / columns
            larger = [rows, *shape[1:]]
            patches[f"diffusion_model.final_layer.{stream}_out.{leaf}"] = LoRAAdapter(
                set(), (up, down, None, None, None, larger)
            )
    return patches


@pytest.fixture
def file(tmp_path):
    return CASE.save(CASE.model(), tmp_path / "h3.safetensors")


@pytest.fixture
def model(module, file):
    """A MODEL on ranks with such a LoRA."""
    checkpoint = open_checkpoint(file)
    meta = {name: torch.empty(shape, device="meta") for name, shape in checkpoint.original_shapes.items()}
    config = types.SimpleNamespace(process_unet_state_dict=lambda tensors: tensors)
    weights = module("model.lora").NativeWeights(checkpoint, meta, config, torch.float32)
    setup = Setup(file, "fp32", ("cpu",), Degrees(), "auto")
    native = torch.nn.Module()
    native.model_loaded_weight_memory = 0
    native.diffusion_model = module("model.diffusion_model").RemoteDiffusionModel(
        checkpoint, setup, setup.devices, True, weights, "Flux", {}
    )
    model = module("model.patcher").RemoteModelPatcher(native, torch.device("cpu"))
    model.add_patches(lora(load_file(file)))
    return model


def with_head(file, start, stop, path):
    """The file with the head of a step over these parts."""
    state = load_file(file)
    for key, adapter in lora(state).items():
        key = key.removeprefix("diffusion_model.")
        bank = adapter.product().view(-1, *state[key].shape[1:])
        bank[: len(state[key])] += state[key]
        first, *others = bank.chunk(HEADS)
        lengths = -grid(SHIFTS[key.split(".")[1].removesuffix("_out")]).diff()[start:stop]
        for share, part in zip(lengths / lengths.sum(), range(start, stop), strict=True):
            first = first + (float(share) * others[part - 1] if part else 0.0)
        state[key] = first.contiguous()
    with safe_open(file, framework="pt") as opened:
        save_file(state, path, opened.metadata())
    return path


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2)], ids=str)
def test_a_step_computes_with_the_mean_of_the_heads_that_it_spans(module, model, file, pools, tmp_path, degrees):
    bank, stub, given = module("model.head_bank"), model.stub, CASE.inputs()
    assert stub.heads_of(model.patches) == HEADS and stub.setup.enlarged == ()
    stub.run.patches = model.patches
    on_ranks, sigmas = pools.load(file, degrees), grid(12.0)[::2].float()
    for step, (start, stop) in enumerate([(0, 2), (2, 4), (6, 8)]):
        timestep = torch.tensor([1000.0 * sigmas[start // 2]])
        stub.run.head_strengths = bank.strengths_in_call(HEADS, timestep, {"sample_sigmas": sigmas})
        on_ranks.adapt("bank", stub._deltas(), lambda: None, stub._strengths())
        found = packed(latents_of(on_ranks.predict(ModelCall(*given), lambda: None)))
        expected = CASE.reference(
            tiny.published_model(with_head(file, start, stop, tmp_path / f"{step}.safetensors")), *given
        )
        assert tiny.relative(found, expected) < 1e-5
    on_ranks.adapt(None, (), lambda: None)


def test_strengths_are_shares_of_the_parts_between_two_sigmas(module):
    strengths = module("model.head_bank").head_strengths
    sigmas = torch.tensor([1.0, 0.97, 0.5, 0.0])
    for sigma in (1.0, 0.971, 0.5, 0.0):
        video, sound = torch.tensor(strengths(HEADS, sigma, sigmas, (12.0, 3.0))).view(2, HEADS - 1)
        assert torch.equal(video > 0, sound > 0), "both streams span the same heads"
        assert (video.sum() <= 1 + 1e-6) and (sigma == 1.0 or float(video.sum()) == pytest.approx(1.0))
    assert strengths(1, 0.5, sigmas, (12.0, 3.0)) == ()


def test_heads_that_do_not_fit_each_other_are_refused(module, model):
    del model.patches["diffusion_model.final_layer.audio_out.bias"]
    with pytest.raises(
        ValueError, match=r"the output heads of this PDD acceleration LoRA do not fit each other.*turbo LoRA"
    ):
        model.stub.heads_of(model.patches)


def test_a_sampler_without_sigmas_is_refused(module):
    with pytest.raises(ValueError, match="needs the sampler's sigmas"):
        module("model.head_bank").strengths_in_call(HEADS, torch.tensor([1000.0]), {})
