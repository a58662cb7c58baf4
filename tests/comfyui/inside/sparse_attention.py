"""Model Sparse Attention on every MODEL, native and on ranks in threads. Run by serve.py.

In place of comfy-kitchen's kernel stands attention in which a token sees those before it: it depends on the order of tokens
as block-sparse attention does, and in a sequence of any length.
"""

import sys
from contextlib import ExitStack
from functools import partial
from unittest import mock

import comfy_kitchen
import nodes_sparse_attention
from boot import PACK, Results, difference, native_model, parallel, sequence, torch
from small_cases import sample, small

sys.path.insert(0, str(PACK))
from parallel_backend.client.registry import registry
from parallel_backend.rank.attention import sparse
from testing.thread_ranks import thread_ranks


def causal(q, k, v, scale=None, **_settings):
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=scale).transpose(1, 2)


def main(results: Results, least: dict[str, int]) -> None:
    """`least`: small model -> tokens from which on attention is sparse."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(comfy_kitchen, "sol_attn", causal, create=True))
        stack.enter_context(mock.patch.object(sparse, "refusal", lambda *_: ""))
        start = stack.enter_context(thread_ranks())
        stack.enter_context(mock.patch.object(registry(), "start_of", lambda _devices: start))
        stack.callback(registry().close)
        for name, tokens in least.items():
            results.case(name, partial(compare, name, tokens))


def compare(name: str, least: int) -> dict:
    settings = nodes_sparse_attention.settings(min_tokens=least)
    with small(name):
        native = native_model(f"{name}.safetensors")
        expected = sample(nodes_sparse_attention.apply(native, settings), name)
        in_full = sample(native, name)
        found = {}
        load = partial(parallel, f"{name}.safetensors", pipe=1)
        modes = {"one rank": partial(load, devices="cpu"), "ulysses": partial(load, config=sequence(ulysses=2))}
        for mode, make in modes.items():
            model = make()
            found[mode] = difference(expected, sample(nodes_sparse_attention.apply(model, settings), name))
    kinds = [isinstance(each.model.diffusion_model, type(native.model.diffusion_model)) for each in (native, model)]
    return found | {"in full": difference(expected, in_full), "told apart": kinds}
