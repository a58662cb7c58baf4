"""Block-sparse attention over several ranks is that of one process, whose tokens lie in ComfyUI's order."""

import importlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.client.call import ModelCall
from parallel_backend.core.block_changes import BlockChanges
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.sparse_attention import KEYS, KEYS_AND_ROWS, SparseAttention
from parallel_backend.families.parts.minimax_conditioning import reference_runs
from testing import tiny
from testing.cases import all_cases
from testing.cases import minimax_h3 as h3

pytestmark = pytest.mark.threads

sparse = importlib.import_module("parallel_backend.rank.attention.sparse")
REFUSAL = sparse.refusal
TOLERANCE = 1e-5
BLOCK = 64
CASES = {case.name: case for case in all_cases()}
FAST = replace(
    CASES["minimax-h3-pruned"], name="fast", config=h3.CURVE | {"gate_compress": True, "num_attention_heads": 4}, odd=None
)
LATENT = (24, 5, 22, 18)
"""5 x 11 x 9 tokens: a whole and a cut cube along each axis."""


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


def inputs_of_h3(batch=1):
    generator = torch.Generator().manual_seed(1)
    video, sound = torch.randn(batch, *LATENT, generator=generator), torch.randn(batch, 32, 2, 75, generator=generator)
    payload = h3.payload(generator, (5, 11, 9))
    entry = {
        "context": torch.randn(batch, 90, FAST.config["text_dim"], generator=generator),
        "minimax_payload": payload | {"text_token_tags": torch.ones(1, 90, dtype=torch.long)},
        "denoise_mask": (torch.rand(1, 1, 5, 22, 18, generator=generator) * 4).round() / 4,
        "audio_denoise_mask": (torch.rand(1, 1, 2, 75, generator=generator) * 3).round() / 3,
        "grid": (5, 11, 9),
        "companion_tokens": 150,
    }
    tensors = FAST.row.inputs.conditioning(FAST.config, entry)
    return (video, sound), torch.full((batch,), 700.0), tensors, reference_runs(payload)


class InComfyUIsOrder:
    """A processor of diffusers' attention: block-sparse over the packed sequence text, keyframes, references, sound, video.

    diffusers' own sequence has the references before the keyframes, as the product's conditioning.
    """

    def __init__(self, settings: SparseAttention, runs, gates):
        self._settings, self._runs, self._gates = settings, runs, gates

    def __call__(self, attn, hidden_states, rotary_emb=None, attention_mask=None):
        from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb as rotated

        q, k, v = (each(hidden_states).unflatten(-1, (attn.heads, -1)) for each in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if rotary_emb is None:
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        else:
            q, k = rotated(q, *rotary_emb), rotated(k, *rotary_emb)
            gate = self._gates[attn](hidden_states).unflatten(-1, (attn.heads, -1)) if attn in self._gates else None
            out = self._sparse(q, k, v, gate)
        return attn.to_out[0](out.flatten(2))

    def _segments(self, tokens):
        """Rows of the packed sequence, a list for each segment in ComfyUI's order."""
        words, sound, video = 90, 150, 5 * 11 * 9
        starts = [words + start for start, _ in self._runs]
        rows = [list(range(words))]
        rows += [list(range(start, start + stop - first)) for start, (first, stop) in zip(starts, self._runs, strict=True)]
        rows += [list(range(tokens - video - sound, tokens - video)), list(range(tokens - video, tokens))]
        assert sorted(itertools.chain(*rows)) == list(range(tokens))
        return rows

    def _sparse(self, q, k, v, gate):
        settings, segments = self._settings, self._segments(q.shape[1])
        if settings.cubes:
            return self._cubes(q, k, v, gate, segments)
        order = torch.tensor([*itertools.chain(*segments)])
        before = sum(map(len, segments[:-1]))
        blocks = -(-before // BLOCK)
        sinks = (0, blocks) if settings.sinks else (0, 0)
        rows = ((before - len(segments[-2])) // BLOCK, blocks) if settings.sinks == KEYS_AND_ROWS else (0, 0)
        ordered = (x[:, order] for x in (q, k, v))
        found = block_sparse(*ordered, settings.tau, None, sinks, rows, settings.kept, 0)
        out = torch.empty_like(found)
        out[:, order] = found
        return out

    def _cubes(self, q, k, v, gate, segments):
        blocks = []
        for rows in segments[:-1]:
            blocks += [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
        before, video = len(blocks), segments[-1]
        for frame in range(0, 5, 4):
            for row in range(0, 11, 4):
                for column in range(0, 9, 4):
                    inside = [(frame + f, row + r, column + c) for f in range(4) for r in range(4) for c in range(4)]
                    blocks.append([video[(f * 11 + r) * 9 + c] for f, r, c in inside if f < 5 and r < 11 and c < 9])
        padded = torch.zeros(4, 1, len(blocks) * BLOCK, *q.shape[2:])
        for number, rows in enumerate(blocks):
            for x, into in zip((q, k, v, gate), padded, strict=True):
                into[:, number * BLOCK : number * BLOCK + len(rows)] = x[:, rows]
        lengths, ends = torch.tensor([len(rows) for rows in blocks]), (0, before)
        found = block_sparse(
            *padded[:3], 0.0, None, ends, ends, self._settings.kept, 0, False, lengths, coarse_gate=padded[3]
        )
        out = torch.empty_like(q)
        for number, rows in enumerate(blocks):
            out[:, rows] = found[:, number * BLOCK : number * BLOCK + len(rows)]
        return out


VSA = SparseAttention(kept=0.3, cubes=True)
H3_SETTINGS = {
    "vsa": VSA,
    "sla": SparseAttention(kept=0.2, sinks=KEYS),
    "sol": SparseAttention(tau=0.5, sinks=KEYS_AND_ROWS),
}


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A FastH3, as module and as file."""
    model = FAST.model()
    return model, FAST.save(model, tmp_path_factory.mktemp("fast") / "fast.safetensors")


@pytest.fixture(scope="module")
def expected_of_h3(fast):
    """By name of the settings: the output of diffusers' class."""
    model, _ = fast
    latents, timestep, tensors, runs = inputs_of_h3()
    outputs = {}
    for name, settings in {"full": None, **H3_SETTINGS}.items():

        def published(*args, _make=h3.MiniMaxH3Transformer3DModel, _settings=settings, **named):
            made_model = _make(*args, **named)
            if _settings is not None:
                pairs = zip(made_model.transformer_blocks, model.transformer_blocks, strict=True)
                gates = {theirs.attn: ours.attn.to_gate_compress for theirs, ours in pairs}
                for block in made_model.transformer_blocks:
                    block.attn.set_processor(InComfyUIsOrder(_settings, runs, gates))
            return made_model

        with mock.patch.object(h3, "MiniMaxH3Transformer3DModel", published), torch.inference_mode():
            outputs[name] = FAST.reference(_without_gates(model), latents, timestep, tensors)
    return outputs


def _without_gates(model):
    class Ungated(torch.nn.Module):
        def state_dict(self):
            return {name: value for name, value in model.state_dict().items() if "gate_compress" not in name}

    return Ungated()


def of_ranks(pools, file, degrees, call, settings):
    model = pools.load(file, degrees)
    changes = BlockChanges(sparse=settings)
    return model.predict(replace(call, changes=changes), lambda: None), model


DEGREES = [Degrees(), Degrees(ulysses=2), Degrees(ulysses=3), Degrees(pipe=2), Degrees(tensor=2), Degrees(ulysses=2, pipe=2)]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("name", H3_SETTINGS)
def test_h3_equals_one_process(name, degrees, pools, fast, expected_of_h3, measured):
    latents, timestep, tensors, runs = inputs_of_h3()
    settings = replace(H3_SETTINGS[name], references=runs)
    output, _ = of_ranks(pools, fast[1], degrees, ModelCall(latents, timestep, tensors), settings)
    for one, other in zip(output, expected_of_h3[name], strict=True):
        measured(f"relative error of sparse attention, {name}", error := tiny.relative(one, other))
        assert error <= TOLERANCE
    assert tiny.relative(output[0], expected_of_h3["full"][0]) > 1e-3, "nothing was left out"


FALLBACKS = {
    "ring": (Degrees(ring=2), "sol", {}, "a ring_degree and a patch_degree of 1"),
    "patches": (Degrees(patch=2, patch_mode="displaced"), "sla", {}, "a ring_degree and a patch_degree of 1"),
    "VSA by all-gather": (Degrees(ulysses=2, exchange="all-gather"), "vsa", {}, "ulysses_exchange all-to-all"),
    "short": (Degrees(ulysses=2), "sol", {"least_tokens": 1000}, ""),
    "dense_blocks": (Degrees(ulysses=2), "vsa", {"full": tuple(f"transformer_blocks.{index}" for index in range(3))}, ""),
}


@pytest.mark.parametrize(("degrees", "name", "changed", "words"), FALLBACKS.values(), ids=FALLBACKS)
def test_what_cannot_be_sparse_is_in_full_and_says_why(degrees, name, changed, words, pools, fast, expected_of_h3):
    latents, timestep, tensors, runs = inputs_of_h3()
    settings = replace(H3_SETTINGS[name], references=runs, **changed)
    output, model = of_ranks(pools, fast[1], degrees, ModelCall(latents, timestep, tensors), settings)
    for one, other in zip(output, expected_of_h3["full"], strict=True):
        assert tiny.relative(one, other) <= TOLERANCE
    (engine,) = model.pool.ranks.workers[0].engines.values()
    said = engine.stage.attention_report()
    assert said.startswith("in full in place of ") == bool(words)
    assert words in said


def test_without_the_kernel_it_is_in_full(pools, fast, expected_of_h3, monkeypatch):
    """As in ComfyUI, whose node looks for it at each call."""
    monkeypatch.undo()
    latents, timestep, tensors, runs = inputs_of_h3()
    output, model = of_ranks(
        pools, fast[1], Degrees(ulysses=2), ModelCall(latents, timestep, tensors), replace(VSA, references=runs)
    )
    assert tiny.relative(output[0], expected_of_h3["full"][0]) <= TOLERANCE
    (engine,) = model.pool.ranks.workers[0].engines.values()
    assert "comfy-kitchen's kernel" in engine.stage.attention_report()
    assert engine.stage.attention_report() == ""


def test_calls_of_sparse_and_full_attention_in_turn(pools, fast, expected_of_h3):
    """As at the node's start_percent, with the prompt kept on the ranks."""
    latents, timestep, tensors, runs = inputs_of_h3()
    model = pools.load(fast[1], Degrees(ulysses=2))
    for name in ("full", "vsa", "full", "sol", "vsa"):
        settings = None if name == "full" else replace(H3_SETTINGS[name], references=runs)
        call = ModelCall(latents, timestep, tensors, changes=BlockChanges(sparse=settings))
        assert tiny.relative(model.predict(call, lambda: None)[0], expected_of_h3[name][0]) <= TOLERANCE
