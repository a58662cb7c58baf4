"""A PDD acceleration LoRA of MiniMax H3: a bank of output heads, of which each step takes the mean over what it spans."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.client.call import ModelCall
from parallel_backend.core.degrees import Degrees
from testing import mini
from tests.support.stand_in_comfyui import LoRAAdapter

pytestmark = pytest.mark.threads

HEADS, RANK = 8, 3
STREAMS = "img_in", "final_layer.linear"
"""Layers of the mini model in place of MiniMax H3's output layers of video and sound."""
SHIFTS = dict(zip(STREAMS, (12.0, 3.0), strict=True))


def grid(shift):
    """Sigmas at the borders of the heads' parts."""
    even = torch.linspace(1, 0, HEADS + 1, dtype=torch.float64)
    return shift * even / (1 + (shift - 1) * even)


def lora(state):
    """For both layers, weights and biases, with the rows of all heads."""
    g, patches = torch.Generator().manual_seed(4), {}
    for stream in STREAMS:
        for leaf in ("weight", "bias"):
            shape = state[f"{stream}.{leaf}"].shape
            rows, columns = HEADS * shape[0], shape[1:].numel()
            up, down = torch.randn(rows, RANK, generator=g), torch.randn(RANK, columns, generator=g) / columns
            larger = [rows, *shape[1:]]
            adapter = LoRAAdapter(set(), (up, down, None, None, None, larger))
            patches[f"diffusion_model.{stream}.{leaf}"] = [(1.0, adapter, 1.0, None, None)]
    return patches


@pytest.fixture
def bank(module, monkeypatch):
    """The module of banks, for STREAMS."""
    bank = module("model.lora.head_bank")
    monkeypatch.setattr(bank, "STREAMS", STREAMS)
    keys = frozenset(f"diffusion_model.{stream}{leaf}" for stream in STREAMS for leaf in bank.LEAVES)
    monkeypatch.setattr(bank, "BANK_KEYS", keys)
    return bank


@pytest.fixture
def weights(module, mini_file):
    checkpoint = mini.opened(mini_file)
    return module("model.lora.lora").NativeWeights(checkpoint, checkpoint.built.own, torch.float32)


def with_head(file, start, stop, path):
    """The file with the head of a step over these parts."""
    state = load_file(file)
    for key, [(_, adapter, *_)] in lora(state).items():
        key = key.removeprefix("diffusion_model.")
        bank = adapter.product().view(-1, *state[key].shape[1:])
        bank[: len(state[key])] += state[key]
        first, *others = bank.chunk(HEADS)
        lengths = -grid(SHIFTS[key.rpartition(".")[0]]).diff()[start:stop]
        for share, part in zip(lengths / lengths.sum(), range(start, stop), strict=True):
            first = first + (float(share) * others[part - 1] if part else 0.0)
        state[key] = first.contiguous()
    save_file(state, path)
    return path


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tensor=2)], ids=str)
def test_a_step_computes_with_the_mean_of_the_heads_that_it_spans(bank, weights, mini_file, pools, tmp_path, degrees):
    patches, given = lora(load_file(mini_file)), mini.inputs()
    assert bank.heads_of(weights, patches) == HEADS
    deltas = list(bank.bank_deltas(weights, patches, HEADS, 1))
    on_ranks, sigmas = pools.mini(mini_file, degrees), grid(12.0)[::2].float()
    for step, (start, stop) in enumerate([(0, 2), (2, 4), (6, 8)]):
        timestep = torch.tensor([1000.0 * sigmas[start // 2]])
        strengths = bank.strengths_in_call(HEADS, timestep, {"sample_sigmas": sigmas})
        on_ranks.adapt("bank", deltas, lambda: None, strengths)
        found = on_ranks.predict(ModelCall(*given), lambda: None)
        expected = mini.reference(mini.load(with_head(mini_file, start, stop, tmp_path / f"{step}.safetensors")), *given)
        assert mini.relative(found, expected) < 1e-5
    on_ranks.adapt(None, (), lambda: None)


def test_heads_that_do_not_fit_each_other_are_refused(bank, weights, mini_file):
    patches = lora(load_file(mini_file))
    del patches["diffusion_model.final_layer.linear.bias"]
    with pytest.raises(
        ValueError, match=r"the output heads of this PDD acceleration LoRA do not fit each other.*turbo LoRA"
    ):
        bank.heads_of(weights, patches)
