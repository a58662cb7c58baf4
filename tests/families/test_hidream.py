"""HiDream beyond what all families are tested for."""

import pytest
import torch

from parallel_backend.families import FAMILIES
from testing.cases import hidream


def conditioning(family, config, **given):
    return FAMILIES[family].inputs.conditioning(config, {"latent": (2, 3, 8, 6), **given})


@pytest.mark.parametrize("llama", [None, torch.zeros(1, 4, 6, 20), torch.zeros(1, 5, 6, 21)], ids=str)
def test_hidream_needs_the_layers_of_llama(llama):
    given = {"context": torch.zeros(1, 3, 20), "y": torch.zeros(1, 12)}
    whole = conditioning("hidream-i1", hidream.CONFIG, **given, encoder_hidden_states_llama3=torch.zeros(1, 5, 6, 20))
    assert whole["context"].shape[1] == 3 + 6 + 6
    with pytest.raises(ValueError, match="positive, negative: HiDream needs Llama's text"):
        conditioning("hidream-i1", hidream.CONFIG, **given, encoder_hidden_states_llama3=llama)
