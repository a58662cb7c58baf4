"""Qwen-Image 2.1's model and blocks in the form that ranks cut. Text and reference images come in front of
the latent's tokens, and do not attend to them."""

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
    """RowRule: a text token attends to all tokens up to itself, an image token to all up to the end of its image.

    `runs`: how many tokens of one kind follow each other, and whether they are text. The last are the latent's."""

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
    """Where they are among the rule's rows: [n] int64 unless they follow each other."""
    numbers: torch.Tensor
    """[n] int64: their numbers among all tokens."""


def _among(numbers: torch.Tensor, start: int, stop: int, device: torch.device) -> Picked:
    """The rows whose numbers are from `start` on and less than `stop`."""
    places = ((numbers >= start) & (numbers < stop)).nonzero()[:, 0]
    return Picked(in_a_row(places, device), numbers[places].to(device))


def causal_of(attend: Callable[..., torch.Tensor]) -> Causal:
    """The rule of the class's own function, which closes over segments: (start, stop, mask). Text alone has a mask."""
    segments = inspect.getclosurevars(attend).nonlocals["segments"]
    return Causal(tuple((stop - start, mask is not None) for start, stop, mask in segments))


class QwenImage21Model(Form):
    """Takes reference images at any places in the text. A call has them in order; a trial has other places and less text."""

    def build_sequence(self, x, context, ref_latents, image_slots):
        places = sorted(min(place, context.shape[1]) for place in image_slots)
        return super().build_sequence(x, context, ref_latents, places)


class QwenImage21Block(Form):
    """The number of words, which are modulated for time 0, becomes a row for each token: whether it is one. Attention is by
    rows."""

    def __call__(self, x, mod, pe, attn_fn, prefix_len, transformer_options):
        # pe has a row for each token of the whole, in all blocks.
        return super().__call__(x, mod, pe, causal_of(attn_fn), which_words(prefix_len, pe.shape[1]), transformer_options)

    def forward(self, x, mod, pe, rule, is_word_S, transformer_options):
        words, attend = words_among(is_word_S), functools.partial(_attend, rule)
        return super().forward(x, mod, pe, attend, words, transformer_options)


@functools.lru_cache(maxsize=4)
def which_words(words: int, tokens: int) -> torch.Tensor:
    """[S] bool in host memory, so that the host does not wait for a device. The blocks of a call share it."""
    with torch.inference_mode(False):  # a trial looks at what is written to
        return torch.arange(tokens) < words


@torch.compiler.disable  # a number on the host
def words_among(is_word_S: torch.Tensor) -> int:
    """How many words these tokens have in front of the others."""
    words = int(is_word_S.sum())
    assert bool(is_word_S[:words].all()), "words come first in all that ranks cut"
    return words


def _attend(rule: Causal, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _heads: int) -> Any:
    return attention_by_rows(rule, q, k, v).flatten(2)
