"""Redirects torch's SDPA to ParallelAttention, for attention processors that call SDPA without diffusers' dispatcher."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class SdpaProcessor:
    """Runs the layer's processor, with the processor's call of SDPA redirected to the layer's ParallelAttention.

    Has the attributes of processors that use the dispatcher, so that both kinds are installed alike.
    """

    def __init__(self, processor: Callable):
        self._parallel_config: Any = None
        self._attention_backend: Any = None
        self.processor = processor
        # diffusers passes the arguments that this attribute's signature names. A call still runs the class's `__call__`,
        # since Python looks that up on the class.
        self.__call__ = processor.__call__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with SdpaRedirect(self._parallel_config):
            return self.processor(*arguments, **named)


class SdpaRedirect(TorchFunctionMode):
    """While entered, torch's SDPA calls `attention`, a ParallelAttention, instead."""

    def __init__(self, attention: Any):
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Callable, _types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """SDPA's arguments by name: query, key and value [B, H, s, D]. Returns [B, H, s, D]."""
        assert dropout_p == 0.0, "parallel attention has no dropout"
        assert not is_causal, "parallel attention has no causal attention"
        assert not enable_gqa, "parallel attention needs as many key heads as query heads"
        q_BsHD, k_BsHD, v_BsHD = (x.transpose(1, 2) for x in (query, key, value))
        return self._attention.attend(q_BsHD, k_BsHD, v_BsHD, scale, attn_mask).transpose(1, 2)
