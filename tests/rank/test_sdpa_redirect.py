"""Processors that call torch's SDPA themselves reach ParallelAttention with all that it needs."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, HunyuanAttnProcessor2_0

from parallel_backend.rank.attention.sdpa_redirect import SdpaProcessor


class Recorder:
    """Stands in for ParallelAttention: computes attention as torch does."""

    def __init__(self):
        self.calls = []

    def attend(self, query, key, value, scale, mask=None):
        self.calls.append((tuple(query.shape), scale, mask))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def redirected(processor) -> tuple[SdpaProcessor, Recorder]:
    wrapped = SdpaProcessor(processor)
    wrapped._parallel_config = Recorder()
    return wrapped, wrapped._parallel_config


def test_parallel_attention_gets_the_call_with_tokens_first_and_its_mask():
    layer = Attention(query_dim=24, heads=3, dim_head=8, processor=AttnProcessor2_0()).requires_grad_(False)
    x, mask = torch.randn(2, 5, 24), torch.randn(2, 1, 5)
    expected = layer(x, attention_mask=mask)
    layer.processor, attention = redirected(layer.processor)
    assert torch.allclose(layer(x, attention_mask=mask), expected, atol=1e-6)
    ((shape, scale, seen),) = attention.calls
    assert shape == (2, 5, 3, 8)
    assert scale is None
    assert seen.shape == (2, 3, 1, 5)


def test_arguments_that_only_this_processor_knows_reach_it():
    """diffusers drops those that it does not find in the processor's signature."""
    processor = HunyuanAttnProcessor2_0()
    wrapped, _ = redirected(processor)
    assert inspect.signature(wrapped.__call__) == inspect.signature(processor.__call__)
    assert "image_rotary_emb" in inspect.signature(wrapped.__call__).parameters


@pytest.mark.parametrize("option", [{"dropout_p": 0.1}, {"is_causal": True}, {"enable_gqa": True}])
def test_options_that_parallel_attention_cannot_take_are_noticed(option):
    wrapped, _ = redirected(lambda x: F.scaled_dot_product_attention(x, x, x, **option))
    with pytest.raises(AssertionError, match="parallel attention"):
        wrapped(torch.randn(1, 2, 3, 4))


def test_calls_outside_the_layer_are_torchs_own():
    wrapped, attention = redirected(lambda x: x + 1)
    wrapped(torch.zeros(1, 2, 3, 4))
    x = torch.randn(1, 2, 3, 4)
    F.scaled_dot_product_attention(x, x, x)
    assert not attention.calls
