"""What MiniMax H3 refuses of a call's keyframes, references and tags, and what of them reaches the ranks."""

import pytest
import torch

from parallel_backend.families import FAMILIES
from parallel_backend.families.base.step_inputs import REFERENCES
from testing.cases.minimax_h3 import CONFIG, GRID, payload

TEXT = torch.zeros(1, 7, CONFIG["text_dim"])


def conditioning(**changes) -> dict[str, torch.Tensor]:
    given = payload(torch.Generator().manual_seed(0), GRID) | changes
    return FAMILIES["minimax-h3"].inputs.conditioning(CONFIG, {"context": TEXT, "minimax_payload": given, "grid": GRID})


@pytest.mark.parametrize(
    "changes",
    [
        {"text_token_tags": torch.ones(1, 6)},
        {"text_token_tags": torch.full((1, 7), 3)},
        {"keyframes": [{"resolved_frame_index": 0, "latent": torch.zeros(1, 24, 1, 5, 4)}]},
        {"keyframes": [{"resolved_frame_index": 0, "latent": torch.zeros(1, 16, 1, 6, 4)}]},
        {"refs": [{"kind": "audio", "ref_audio_t": 3, "audio_latent": torch.zeros(1, 8, 3, 16)}]},
    ],
    ids=["too few tags", "an unknown tag", "an odd keyframe", "another model's keyframe", "another model's sound"],
)
def test_what_does_not_fit_is_refused(changes):
    with pytest.raises(ValueError, match=r"^positive, negative: "):
        conditioning(**changes)


def test_references_are_a_little_noisy_and_their_noise_follows_the_seed():
    clean = conditioning(visual_cond_noise_aug=1.0)[REFERENCES]
    one, same, other = (conditioning(seed=seed)[REFERENCES] for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert 1e-4 < (one - clean).std() < 1e-2
    assert not torch.equal(one, other)
