"""A video's VAE gives its output in the pieces that its row says, and what it gives does not depend on them."""

import pytest
import torch

from parallel_backend.vaes import VAES, streams
from testing import tiny

LTX = {
    "channels": 3,
    "width": 64,
    "blocks": {
        "encoder": [
            ["compress_all", 1],
            ["compress_space_res", {"multiplier": 1}],
            ["compress_time", 1],
            ["compress_all_res", 1],
        ],
        "decoder": [["res_x", 1], *[["compress_all", {"residual": True, "multiplier": 2}]] * 3, ["res_x", 1]],
    },
    "padding_modes": {"encoder": "zeros", "decoder": "reflect"},
    "patch_size": 2,
    "latent_channels": 8,
    "latent_log_var": "uniform",
    "norm_layer": "pixel_norm",
    "causal_decoder": False,
    "timed": False,
    "timestep": 0.05,
}
HUNYUAN = {"kind": "video", "channels": 3, "z": 4, "chunked": True, "layers": 1, "widths": [16, 16, 8]}
CASES = {
    "LTX-Video decoder": (LTX, (1, 8, 7, 2, 3), 49),
    "LTX-Video encoder": (LTX, (1, 3, 33, 16, 16), 5),
    "HunyuanVideo 1.5 decoder": (HUNYUAN | {"factors": [[2, 2, 2], [2, 2, 2]]}, (1, 4, 6, 2, 2), 21),
    "HunyuanVideo 1.5 encoder": (HUNYUAN | {"factors": [[2, 2, 2], [2, 2, 2]]}, (1, 3, 24, 8, 8), 6),
}


@torch.inference_mode()
def run(case: str) -> torch.Tensor:
    config, shape, _frames = CASES[case]
    name, _, part = case.rpartition(" ")
    model = tiny.randomise(VAES[name].build(part, config), seed=0)
    x, found = torch.randn(shape, generator=torch.Generator().manual_seed(1)), []
    for index, piece in enumerate(VAES[name].pieces(part, shape[2])):
        found.append(model(x[:, :, piece.frames.slice], index == 0))
        assert found[-1].shape[2] == piece.output
    model.reset()
    kept = [module for module in model.modules() if isinstance(module, streams.Streaming)]
    assert kept
    assert not any(torch.is_tensor(value) for module in kept for value in vars(module).values())
    return torch.cat(found, dim=2)


@pytest.mark.parametrize("case", CASES)
def test_pieces_change_nothing(case, monkeypatch):
    in_pieces = run(case)
    assert in_pieces.shape[2] == CASES[case][2]
    monkeypatch.setattr(streams, "FRAMES", 1000)
    whole = run(case)
    assert whole.std() > 0.01
    assert (in_pieces - whole).abs().max() <= 1e-5 * whole.abs().max()
