"""The one place where attention is parallel: diffusers' dispatcher, given a `Seam` by the layer's processor, lands here.

Order of composition: Ulysses all-to-all in, K/V buffer update, the attention kernel, all-to-all out. Queries and keys
arrive normalised and with rotary embedding applied, [B, s, H, D].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from .collectives import Traffic, heads_to_sequence, sequence_to_heads
from .config import flash_possible
from .kv_buffer import KVBuffer
from .layout import Span
from .mesh import Axis

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]


def sdpa(q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, scale: float | None) -> torch.Tensor:
    """torch's scaled dot product attention over [B, S, H, D], which picks its own kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def flash(q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, scale: float | None) -> torch.Tensor:
    """flash-attn over [B, S, H, D]; half precision on CUDA only."""
    from flash_attn import flash_attn_func

    return flash_attn_func(q_BSHD, k_BSHD, v_BSHD, softmax_scale=scale)


def choose_kernel(attention: str, device: torch.device, dtype: str) -> Kernel:
    """`auto`: flash-attn where it is installed and possible, else torch SDPA."""
    return flash if attention in ("auto", "flash") and flash_possible(str(device), dtype) else sdpa


@dataclass
class StepView:
    """What attention must know of the micro-step under way. `text`, `image`: this micro-step's tokens over all ranks.

    `text_shards`, `image_shards`: the same cut over the Ulysses axis, by rank. `image` counts from the image's start.
    """

    text_tokens: int  # of the whole sequence, whether or not the text runs in this micro-step
    text_shards: tuple[Span, ...]
    image_shards: tuple[Span, ...]
    entries: Span
    buffer: KVBuffer | None

    @property
    def lengths(self) -> list[int]:
        return [len(text) + len(image) for text, image in zip(self.text_shards, self.image_shards, strict=True)]

    def pieces(self) -> list[tuple[Span, Span]]:
        """(rows among the micro-step's tokens, rank after rank; their positions in the K/V buffer)."""
        pieces, row = [], 0
        for text, image in zip(self.text_shards, self.image_shards, strict=True):
            for span, offset in ((text, 0), (image, self.text_tokens)):
                if len(span):
                    pieces.append((Span(row, row + len(span)), span.shift(offset)))
                    row += len(span)
        return pieces


class AttentionContext:
    """Shared by all layers of a stage: the parts that stay (axis, kernel, counters) and the micro-step under way."""

    def __init__(self, ulysses: Axis, kernel: Kernel, traffic: Traffic):
        self.ulysses, self.kernel, self.traffic = ulysses, kernel, traffic
        self.step: StepView | None = None


@dataclass(frozen=True)
class Seam:
    """Rides in a processor's `_parallel_config`: says which layer is calling, and where the micro-step is described."""

    context: AttentionContext
    layer: int

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """[B, s, H, D] of the rank's own tokens -> [B, s, H, D], attention over all tokens of the sequence."""
        context, step = self.context, self.context.step
        assert step is not None, "attention outside of a micro-step"
        parallel = context.ulysses.size > 1
        if parallel:
            query, key, value = sequence_to_heads(query, key, value, step.lengths, context.ulysses, context.traffic)
        if step.buffer is not None:
            key, value = step.buffer.update(self.layer, key, value, step.pieces(), step.entries)
        out = context.kernel(query, key, value, scale)
        return heads_to_sequence(out, step.lengths, context.ulysses, context.traffic) if parallel else out


def install_seams(modules: list[torch.nn.Module], context: AttentionContext) -> None:
    """Give each attention module, in order, a seam of its own and route diffusers' native backend through it.

    Calls without a seam (another model in the process) keep diffusers' own behaviour. Idempotent.
    """
    for layer, module in enumerate(modules):
        module.processor._parallel_config = Seam(context, layer)
        module.processor._attention_backend = AttentionBackendName.NATIVE
    registry = _AttentionBackendRegistry._backends
    native = registry[AttentionBackendName.NATIVE]
    if getattr(native, "seam_aware", False):
        return

    def dispatch(query, key, value, attn_mask=None, scale=None, _parallel_config=None, **options):
        if not isinstance(_parallel_config, Seam):
            return native(query, key, value, attn_mask=attn_mask, scale=scale, _parallel_config=_parallel_config, **options)
        assert attn_mask is None, "this family passes an attention mask, which no parallel mode here handles yet"
        return _parallel_config.attend(query, key, value, scale)

    dispatch.seam_aware = True
    registry[AttentionBackendName.NATIVE] = dispatch
