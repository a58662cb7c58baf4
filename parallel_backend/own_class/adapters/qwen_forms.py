"""Qwen-Image 2.1's model and blocks in a form that ranks can cut. Text and reference images come before the latent's tokens,
and do not attend to them."""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from parallel_backend.own_class.adapters.animate2_forms import in_a_row
from parallel_backend.own_class.cuts.attention_calls import AttendAll, Rows, attention_by_rows, kept_with
from parallel_backend.own_class.cuts.forms import Form


@dataclass(frozen=True)
class Causal:
    """RowRule: a text token attends up to itself, an image token up to the end of its image.
    `runs`: (number of consecutive tokens of one kind, whether they are text). The last run is the latent."""

    runs: tuple[tuple[int, bool], ...]

    def __call__(self, attend: AttendAll, rows: Rows) -> torch.Tensor:
        q_BQHD, k_BKHD, v_BKHD, queries_Q, keys_K = rows
        device, stops = q_BQHD.device, list(itertools.accumulate(count for count, _ in self.runs))
        if int(queries_Q.min()) >= stops[-1] - self.runs[-1][0]:
            return attend(q_BQHD, k_BKHD, v_BKHD)
        out_BQHD = torch.empty_like(q_BQHD)
        for (count, is_text), stop in zip(self.runs, stops, strict=True):
            place = stop - count, stop
            own = kept_with(queries_Q, (self, place), functools.partial(_among, queries_Q, *place, device))
            if not len(own.numbers):
                continue
            seen = kept_with(keys_K, (self, stop), functools.partial(_among, keys_K, 0, stop, device))
            q, k, v = q_BQHD[:, own.places], k_BKHD[:, seen.places], v_BKHD[:, seen.places]
            if not is_text:
                out_BQHD[:, own.places] = attend(q, k, v)
                continue
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            of_text = F.scaled_dot_product_attention(q, k, v, seen.numbers <= own.numbers[:, None])
            out_BQHD[:, own.places] = of_text.transpose(1, 2)
        return out_BQHD


class Picked(NamedTuple):
    """Some of the rows that a rule gets."""

    places: slice | torch.Tensor
    """Their positions among the rule's rows: a slice if they are consecutive, otherwise [n] int64."""
    numbers: torch.Tensor
    """[n] int64: their numbers among all tokens."""


def _among(numbers: torch.Tensor, start: int, stop: int, device: torch.device) -> Picked:
    """Return the rows with numbers from `start` to `stop` - 1."""
    places = ((numbers >= start) & (numbers < stop)).nonzero()[:, 0]
    return Picked(in_a_row(places, device), numbers[places].to(device))


def causal_of(attend: Callable[..., torch.Tensor]) -> Causal:
    """Return the rule that the class's own attention function follows. The function closes over segments (start, stop,
    mask); only text segments have a mask."""
    segments = inspect.getclosurevars(attend).nonlocals["segments"]
    return Causal(tuple((stop - start, mask is not None) for start, stop, mask in segments))


class QwenImage21Model(Form):
    """Qwen-Image 2.1's model with reference images at any positions in the text. The class needs sorted positions inside the
    text; a trial has less text and random positions."""

    def build_sequence(self, x, context, ref_latents, image_slots):
        places = sorted(min(place, context.shape[1]) for place in image_slots)
        return super().build_sequence(x, context, ref_latents, places)


class QwenImage21Block(Form):
    """Qwen-Image 2.1's block. Instead of the number of text tokens, which are modulated for timestep 0, it takes a bool for
    each token. Attention is by a rule."""

    def __call__(self, x, mod, pe, attn_fn, prefix_len, transformer_options):
        # pe has a row for each token of the whole, in all blocks.
        return super().__call__(x, mod, pe, causal_of(attn_fn), which_words(prefix_len, pe.shape[1]), transformer_options)

    def forward(self, x, mod, pe, rule, is_word_S, transformer_options):
        words, attend = words_among(is_word_S), functools.partial(_attend, rule)
        return super().forward(x, mod, pe, attend, words, transformer_options)


@functools.lru_cache(maxsize=4)
def which_words(words: int, tokens: int) -> torch.Tensor:
    """[S] bool: whether a token is text. In host memory, so that the host need not wait for a device. A call's blocks share
    it."""
    with torch.inference_mode(False):  # a trial looks at what is written to
        return torch.arange(tokens) < words


@torch.compiler.disable  # a number on the host
def words_among(is_word_S: torch.Tensor) -> int:
    """Return the number of text tokens at the beginning of these tokens."""
    words = int(is_word_S.sum())
    assert bool(is_word_S[:words].all()), "words come first in all that ranks cut"
    return words


def _attend(rule: Causal, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _heads: int) -> Any:
    return attention_by_rows(rule, q, k, v).flatten(2)
