"""The quickstart model's fixed parts: codec, prompt encoding, and the reader of digits."""

import pytest
import torch

from parallel_backend.quickstart import codec
from parallel_backend.quickstart.prompt import BLANK, NULL, encode_prompt, symbols


def waves(height: int, width: int) -> torch.Tensor:
    """Two smooth pictures [2, height, width] in 0..1 whose rows and columns differ."""
    y, x = torch.meshgrid(torch.arange(height) / 40, torch.arange(width) / 25, indexing="ij")
    return torch.stack([0.5 + 0.4 * torch.sin(x + 2 * y), 0.5 + 0.4 * torch.cos(x) * torch.sin(y)])


@pytest.mark.parametrize("size", [(256, 256), (64, 128), (24, 8)])
def test_codec_round_trip(size):
    images = waves(*size)
    raw = codec.encode(images)
    assert raw.shape == (2, 16, size[0] // 8, size[1] // 8)
    assert raw.dtype == torch.float32
    restored = codec.decode(raw)
    assert restored.shape == images.shape
    assert (restored - images).abs().max() < 0.01


def test_raw_latents_follow_comfyui_flux_format():
    raw = torch.randn(1, 16, 2, 2)
    torch.testing.assert_close(codec.process_in(raw), (raw - 0.1159) * 0.3611)
    torch.testing.assert_close(codec.process_out(codec.process_in(raw)), raw)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 1 4 1", [3, 1, 4, 1]),
        ("3141", [3, 1, 4, 1]),
        ("3, 1, 4, 1", [3, 1, 4, 1]),
        (" 7\n_ 0 ", [7, BLANK, 0, BLANK]),
        ("_", [BLANK] * 4),
        ("", [NULL] * 4),
        ("  ", [NULL] * 4),
    ],
)
def test_symbols(text, expected):
    assert symbols(text) == expected


@pytest.mark.parametrize(("text", "reason"), [("a cat", "'a'"), ("1 2 3 4 5", "5 symbols"), ("-1", "'-'"), ("²", "'²'")])
def test_symbols_name_the_widget_and_the_reason(text, reason):
    with pytest.raises(ValueError, match=r"^text: at most 4 symbols") as error:
        symbols(text)
    assert reason in str(error.value)


def test_encode_prompt():
    context, pooled = encode_prompt("3 1 4 1")
    assert context.shape == (1, 4, 32)
    assert pooled.shape == (1, 16)
    assert context.dtype == pooled.dtype == torch.float32
    assert [row.nonzero().flatten().tolist() for row in context[0]] == [[3, 12], [1, 13], [4, 14], [1, 15]]
    assert pooled[0].nonzero().flatten().tolist() == [1, 3, 4]
    assert pooled[0, 1] == 2 * pooled[0, 3]
