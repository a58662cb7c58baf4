"""Block-sparse attention over several ranks is that of one process, whose tokens lie in ComfyUI's order."""

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.client.call import ModelCall
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.sparse_attention import KEYS, KEYS_AND_ROWS, REST, SOUND, VIDEO, SparseAttention
from parallel_backend.own_class.adapters import adapters
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.calls.tried_calls import Call, draw_weights
from parallel_backend.own_class.cuts.attention_calls import attention_by
from parallel_backend.own_class.trials.trial import trial
from tests.support.planted_comfyui import planted, planted_comfyui

pytestmark = pytest.mark.threads

sparse = importlib.import_module("parallel_backend.rank.attention.sparse")
REFUSAL = sparse.refusal
TOLERANCE = 1e-5
BLOCK = 64
GRID = (5, 6, 5)
"""A whole and a cut cube along each axis."""
SEGMENTS = (70, REST), (9, REST), (41, SOUND), (150, VIDEO)
WORDS = 120
WHERE: dict[str, Any] = {"segments": SEGMENTS, "grid": GRID}
SETTINGS = {
    "vsa": SparseAttention(kept=0.3, cubes=True, **WHERE),
    "sla": SparseAttention(kept=0.2, sinks=KEYS, **WHERE),
    "sol": SparseAttention(tau=0.5, sinks=KEYS_AND_ROWS, **WHERE),
    "some blocks": SparseAttention(kept=0.3, cubes=True, full=("blocks.1", "blocks.3"), **WHERE),
}
DEGREES = [Degrees(), Degrees(ulysses=3), Degrees(tensor=2), Degrees(ulysses=2, pipe=2)]


@pytest.fixture(autouse=True)
def kernel_on_cpu(monkeypatch):
    """comfy-kitchen's own form in torch, of heads of any size. tests/gpu has the kernel itself."""
    monkeypatch.setattr(sparse, "refusal", lambda *_: "")
    kitchen = pytest.importorskip("comfy_kitchen")
    monkeypatch.setattr(kitchen, "sol_attn", block_sparse, raising=False)


@pytest.mark.parametrize(
    ("said", "available", "dtype", "heads_of", "cubes"),
    [
        ("", True, torch.bfloat16, 128, False),
        ("", True, torch.bfloat16, 128, True),
        ("", True, torch.float16, 128, False),
        ("bf16", True, torch.float16, 128, True),
        ("bf16", True, torch.float32, 128, True),
        ("heads of 128, not 64", True, torch.bfloat16, 64, False),
        ("comfy-kitchen's kernel", False, torch.bfloat16, 128, False),
        ("comfy-kitchen's kernel", None, torch.bfloat16, 128, True),
    ],
)
def test_tensors_that_comfyui_would_attend_in_full(monkeypatch, said, available, dtype, heads_of, cubes):
    """`available`: what comfy-kitchen says of the device. None: a release that is not asked."""
    kitchen = pytest.importorskip("comfy_kitchen")
    if available is None:
        monkeypatch.delattr(kitchen, "sol_attn_is_available", raising=False)
    else:
        monkeypatch.setattr(kitchen, "sol_attn_is_available", lambda device: available, raising=False)
    why = REFUSAL(torch.device("cpu"), dtype, heads_of, cubes)
    assert why.startswith(said) and bool(why) == bool(said)


def block_sparse(
    q, k, v, tau, scale, sink_blocks, sink_q, topk_ratio, token_aug, tail=True, block_len=None, coarse_gate=None
):
    """What comfy-kitchen computes, head by head and block by block, with `token_aug` further tokens for a block at once."""
    batch, tokens, heads, size = q.shape
    starts = range(0, tokens, BLOCK)
    lengths = [min(BLOCK, tokens - start) for start in starts] if block_len is None else block_len.tolist()
    out, scale = torch.zeros_like(q), size**-0.5 if scale is None else scale
    for entry in range(batch):
        for head in range(heads):
            parts = [
                [x[entry, start : start + length, head].float() for start, length in zip(starts, lengths, strict=True)]
                for x in (q, k, v)
            ]
            summaries = [torch.stack([block.mean(0) for block in blocks]) for blocks in parts]
            centred = summaries[1] - summaries[1].mean(0)
            for number, start in enumerate(starts):
                chosen = _chosen(number, summaries[0][number], centred, sink_blocks, sink_q, tau, topk_ratio, scale)
                keys = torch.cat([parts[1][block] for block in chosen])
                values = torch.cat([parts[2][block] for block in chosen])
                scores = parts[0][number] @ (keys - summaries[1].mean(0)).T * scale
                weights, seen = scores, values
                rest = [block for block in range(len(lengths)) if block not in chosen]
                if tail and rest:
                    of_blocks = centred[rest] @ summaries[0][number] * scale + torch.tensor([lengths[b] for b in rest]).log()
                    weights = torch.cat((scores, of_blocks.expand(len(scores), -1)), dim=1)
                    seen = torch.cat((values, summaries[2][rest]))
                rows = slice(start, start + lengths[number])
                out[entry, rows, head] = weights.softmax(-1) @ seen
                if coarse_gate is not None:
                    coarse = (summaries[0][number] @ summaries[1].T * scale).softmax(-1) @ summaries[2]
                    out[entry, rows, head] += coarse_gate[entry, rows, head] * coarse
    return out


def _chosen(number, query, centred, sinks, rows, tau, share, scale):
    """The blocks of keys that a query block sees token by token, in order."""
    scores, count = centred @ query * scale, len(centred)
    forced = {block for block in range(count) if abs(block - number) <= 1 or sinks[0] <= block < sinks[1]}
    if rows[0] <= number < rows[1]:
        return list(range(count))
    if not share:
        threshold = tau * (query.pow(2) @ centred.pow(2).mean(0)).sqrt() * scale
        return sorted(forced | {block for block in range(count) if scores[block] > threshold})
    ranked = [block for block in range(count) if not sinks[0] <= block < sinks[1]]
    best = max(0, min(len(ranked) - 1, max(1, round(share * len(ranked)))))
    return sorted(forced | set(sorted(ranked, key=lambda block: -scores[block])[:best]))


@dataclass(frozen=True)
class Made:
    own: OwnClass
    path: Path
    call: ModelCall
    expected: dict[str, torch.Tensor]
    """By name of the settings."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Made]:
    with planted_comfyui(), pytest.MonkeyPatch.context() as patch:
        adapter = adapters.Adapter("blocks", {}, gate="attn.to_gate_compress")
        patch.setattr(adapters, "ADAPTERS", {**adapters.ADAPTERS, "Planted": adapter})
        own, generator = planted("Gated"), torch.Generator().manual_seed(1)
        model = build(own)
        draw_weights(model, 7)
        save_file(dict(model.state_dict()), path := tmp_path_factory.mktemp("model") / "own.safetensors")
        named = {"context": torch.randn(1, WORDS, 16, generator=generator), "control": None}
        given = Call(torch.randn(1, 4, *GRID, generator=generator), torch.full((1,), 700.0), named)
        proof = trial(own, given, (900.0, 1.0), tensor=2)
        assert (proof.stages, proof.sequence, proof.tensor) == ("", "", "")
        call = ModelCall(given.x, given.timestep, to_tensors(named, given.timestep, given.x.shape[1:]))
        expected = {name: of_one_process(model, given, settings) for name, settings in {"full": None, **SETTINGS}.items()}
        yield Made(replace(own, blocks=proof.blocks), path, call, expected)


def of_one_process(model: Any, given: Call, settings: SparseAttention | None) -> torch.Tensor:
    """The class with the formula in place of its attention."""
    gates: list[torch.Tensor | None] = []

    def watch(number: int, attn: Any) -> Any:
        full = settings is None or f"blocks.{number}" in settings.full
        return attn.register_forward_pre_hook(
            lambda module, inputs: gates.append(None if full else module.to_gate_compress(inputs[0]))
        )

    def attend(function: Any, q: Any, k: Any, v: Any, heads: int, **named: Any) -> torch.Tensor:
        gate = gates.pop()
        if settings is None or gate is None:
            return function(q, k, v, heads, **named)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return formula(settings, q, k, v, gate.unflatten(-1, (heads, -1))).flatten(2)

    hooks = [watch(number, block.attn) for number, block in enumerate(model.blocks)]
    with torch.no_grad(), attention_by(attend):
        out = given.run(model)
    for hook in hooks:
        hook.remove()
    return out


def formula(settings: SparseAttention, q: Any, k: Any, v: Any, gate: torch.Tensor) -> torch.Tensor:
    """Block-sparse attention of the packed tokens."""
    if not settings.cubes:
        blocks = -(-WORDS // BLOCK)
        rows = ((WORDS - 41) // BLOCK, blocks) if settings.sinks == KEYS_AND_ROWS else (0, 0)
        return block_sparse(q, k, v, settings.tau, None, (0, blocks), rows, settings.kept, 0)
    members, start = [], 0
    for length, _ in SEGMENTS[:-1]:
        members += [list(range(at, min(at + BLOCK, start + length))) for at in range(start, start + length, BLOCK)]
        start += length
    before = len(members)
    _, height, width = GRID
    for corner in itertools.product(*(range(0, side, 4) for side in GRID)):
        axes = (range(at, min(at + 4, side)) for at, side in zip(corner, GRID, strict=True))
        members.append([start + (f * height + r) * width + c for f, r, c in itertools.product(*axes)])
    padded = torch.zeros(4, 1, len(members) * BLOCK, *q.shape[2:])
    for number, tokens in enumerate(members):
        for x, into in zip((q, k, v, gate), padded, strict=True):
            into[:, number * BLOCK : number * BLOCK + len(tokens)] = x[:, tokens]
    lengths, ends = torch.tensor([len(tokens) for tokens in members]), (0, before)
    found = block_sparse(*padded[:3], 0.0, None, ends, ends, settings.kept, 0, False, lengths, coarse_gate=padded[3])
    out = torch.empty_like(q)
    for number, tokens in enumerate(members):
        out[:, tokens] = found[:, number * BLOCK : number * BLOCK + len(tokens)]
    return out


def of_ranks(pools, made: Made, degrees: Degrees, settings: SparseAttention | None) -> torch.Tensor:
    model = pools.load(made.path, degrees, own=made.own)
    return model.predict(replace(made.call, changes=BlockChanges(sparse=settings)), lambda: None)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_give_what_one_process_gives(name, degrees, pools, made):
    output = of_ranks(pools, made, degrees, SETTINGS[name])
    assert difference(output, made.expected[name]) <= TOLERANCE
    assert difference(output, made.expected["full"]) > 1e-3, "nothing was left out"


DISPLACED = Degrees(patch=2, patch_mode="displaced")
FALLBACKS = {
    "ring": (Degrees(ring=2), "sol", {}, "a ring_degree and a patch_degree of 1"),
    "patches": (DISPLACED, "sla", {}, "a ring_degree and a patch_degree of 1"),
    "short": (Degrees(ulysses=2), "sol", {"least_tokens": 1000}, ""),
    "dense_blocks": (Degrees(ulysses=2), "vsa", {"full": tuple(f"blocks.{index}" for index in range(4))}, ""),
    "other tokens than the call has": (Degrees(ulysses=2), "vsa", {"segments": SEGMENTS[1:]}, ""),
}


@pytest.mark.parametrize(("degrees", "name", "changed", "words"), FALLBACKS.values(), ids=FALLBACKS)
def test_what_cannot_be_sparse_is_in_full_and_says_why(degrees, name, changed, words, pools, made):
    output = of_ranks(pools, made, degrees, replace(SETTINGS[name], **changed))
    assert difference(output, made.expected["full"]) <= TOLERANCE
    said = attention_report(pools, made, degrees)
    assert said.startswith("in full instead of ") == bool(words)
    assert words in said


def attention_report(pools, made: Made, degrees: Degrees) -> str:
    ranks = pools.load(made.path, degrees, own=made.own).pool.ranks
    (engine,) = ranks.workers[0].engines.values()
    return engine.stage.attention_report()
