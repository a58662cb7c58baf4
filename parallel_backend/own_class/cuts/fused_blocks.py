"""Modules of ComfyUI's classes, with fused arithmetic between their matrix products (fused.py).

A module gets a fused form if FORMS has exactly its class's source; its parameters and layers stay. In all other cases, and
in calls with a feature that the form does not have, the class's own code runs.
"""

import functools
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.own_class import ROOT
from parallel_backend.own_class.cuts import fused
from parallel_backend.own_class.cuts.attention_calls import module_global
from parallel_backend.own_class.cuts.forms import Form, put_form

PATCHED = frozenset({"attn1_patch", "attn1_output_patch"})
"""Kinds of other nodes' patches that change attention in a block."""


def fuse(model: nn.Module) -> None:
    """Give the model's modules their fused forms, see FORMS."""
    for module in model.modules():
        kind: Any = type(module)
        digest, form = FORMS.get(f"{kind.__module__}.{kind.__qualname__}", ("", None))
        if form is not None and source_digest(kind) == digest:
            put_form(form, module)


@functools.cache
def source_digest(kind: type) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a class's source."""
    return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]


class FusedQwenImageAttention(Form):
    """Fuses norms and rotary embedding, unless there is a mask or another node's patch between them."""

    def forward(self, *args: Any, **named: Any) -> Any:
        mask, options = named.get("encoder_hidden_states_mask"), named["transformer_options"]
        if args or mask is not None or "attn1_patch" in options.get("patches", {}):
            return super().forward(*args, **named)
        image, text = named["hidden_states"], named["encoder_hidden_states"]
        words, turns_BS1D = text.shape[1], named["image_rotary_emb"].transpose(1, 2)
        of_text = self._heads(
            text, turns_BS1D[:, :words], self.norm_added_q, self.norm_added_k,
            self.add_q_proj, self.add_k_proj, self.add_v_proj,
        )  # fmt: skip
        of_image = self._heads(image, turns_BS1D[:, words:], self.norm_q, self.norm_k, self.to_q, self.to_k, self.to_v)
        q, k, v = (torch.cat(both, dim=1).transpose(1, 2) for both in zip(of_text, of_image, strict=True))
        attend = module_global(self.native, "optimized_attention_masked")
        out = attend(q, k, v, self.heads, None, transformer_options=options, skip_reshape=True)
        # A layer adds its bias in the product if its input is contiguous.
        return self.to_out[1](self.to_out[0](out[:, words:].contiguous())), self.to_add_out(out[:, :words].contiguous())

    def _heads(self, x, turns_BS1D, norm_q, norm_k, *layers):
        q, k, v = (layer(x).unflatten(-1, (-1, self.dim_head)) for layer in layers)
        return *fused.normed_and_rotated(q, k, (norm_q, norm_k), turns_BS1D.contiguous()), v


class FusedQwenImageBlock(Form):
    """Fuses norms and modulation, if all of the image's tokens have the same timestep."""

    def forward(self, *args: Any, **named: Any) -> Any:
        if args or named.get("timestep_zero_index") is not None:
            return super().forward(*args, **named)
        image, text = named.pop("hidden_states"), named.pop("encoder_hidden_states")
        temb, _ = named.pop("temb"), named.pop("timestep_zero_index", None)
        of_image, of_text = (layer(temb)[:, None].chunk(6, dim=-1) for layer in (self.img_mod, self.txt_mod))
        attended, text_attended = self.attn(
            hidden_states=fused.modulated(self.img_norm1, image, *of_image[1::-1]),
            encoder_hidden_states=fused.modulated(self.txt_norm1, text, *of_text[1::-1]),
            **named,
        )
        image = self._rest(image, attended, of_image[2:], self.img_norm2, self.img_mlp)
        return self._rest(text, text_attended, of_text[2:], self.txt_norm2, self.txt_mlp), image

    def _rest(self, x, attended, vectors, norm, mlp):
        gate, shift, scale, last_gate = vectors
        x = fused.gated(x, gate, attended)
        return fused.gated(x, last_gate, mlp(fused.modulated(norm, x, scale, shift)))


class FusedKrea2Norm(Form):
    """Computes in the input's dtype, as the class computes in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], (self.scale + 1).to(x.dtype), self.eps)


class FusedKrea2Attention(Form):
    """Fuses rotary embedding and splits heads without copies, unless another node patches attention."""

    def forward(self, x, freqs=None, mask=None, *, transformer_options):
        if freqs is None or not PATCHED.isdisjoint(transformer_options.get("patches", ())):
            return super().forward(x, freqs, mask, transformer_options=transformer_options)
        q, k, v = (layer(x).unflatten(-1, (-1, self.headdim)) for layer in (self.wq, self.wk, self.wv))
        q, k = self.qknorm(q, k)
        q, k = fused.both_rotated(q, k, freqs.transpose(1, 2).contiguous())
        if (shared := self.heads // self.kvheads) > 1:
            k, v = (each.repeat_interleave(shared, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attend = module_global(self.native, "optimized_attention_masked")
        out = attend(q, k, v, self.heads, mask=mask, skip_reshape=True, transformer_options=transformer_options)
        return self.wo(out * F.sigmoid(self.gate(x)))


class FusedKrea2Modulation(Form):
    """Multiplies the modulation's factors, 1 + scale, by the norms' weights, 1 + the norm's scale. Bands of a call share the
    products."""

    def forward(self, vec, *scales_of_norms):
        vectors = super().forward(vec)
        if not scales_of_norms:
            return vectors
        scale, shift, gate, last_scale, last_shift, last_gate = vectors
        both, last_both = (
            torch.addcmul(each, of_norm.to(each.dtype), 1 + each)
            for each, of_norm in zip((scale, last_scale), scales_of_norms, strict=True)
        )
        return both, shift, gate, last_both, last_shift, last_gate


class FusedKrea2Block(Form):
    """Fuses norms and modulation, if all tokens have the same timestep or each has its own vector."""

    def forward(self, x, vec, freqs, mask=None, timestep_zero_index=None, **named):
        if timestep_zero_index is not None or not isinstance(self.mod, FusedKrea2Modulation):
            return super().forward(x, vec, freqs, mask, timestep_zero_index, **named)
        vectors = self.mod(vec, self.prenorm.scale, self.postnorm.scale)
        scale, shift, gate, last_scale, last_shift, last_gate = vectors
        normed = fused.modulated(without_weight(x.shape[-1], self.prenorm.eps), x, scale, shift)
        x = fused.gated(x, gate, self.attn(normed, freqs, mask, **named))
        normed = fused.modulated(without_weight(x.shape[-1], self.postnorm.eps), x, last_scale, last_shift)
        return fused.gated(x, last_gate, self.mlp(normed))


@functools.cache
def without_weight(features: int, eps: float) -> nn.RMSNorm:
    """Return an RMSNorm without a weight."""
    return nn.RMSNorm(features, eps, elementwise_affine=False)


class FusedMinimaxH3Attention(Form):
    """Calls comfy-kitchen's kernel directly; the class goes through torch's dispatcher. Tokens [S, D]."""

    def forward(self, x, rope_freqs=None, transformer_options=None):
        if rope_freqs is None or torch.compiler.is_compiling():
            return super().forward(x, rope_freqs, transformer_options=transformer_options)
        q, k, v = (each.unflatten(-1, (self.heads, -1))[None] for each in self.qkv_proj(x).chunk(3, dim=-1))
        q, k = fused.normed_and_partly_rotated(q, k, (self.q_norm, self.k_norm), rope_freqs)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attend = module_global(self.native, "optimized_attention")
        out = attend(q, k, v, self.heads, mask=None, skip_reshape=True, transformer_options=transformer_options)
        return self.out_proj(out[0])


class FusedMinimaxH3Block(Form):
    """Fuses modulation and gates for each run of tokens with the same vectors. Tokens [S, D]."""

    def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options):
        # A trial of its features takes gradients, for which nothing may be written in place.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x, t_emb, mod_segments, rope_freqs, transformer_options=transformer_options)
        x_1SD = x[None]
        vectors = [each.to(x.dtype) for each in self.adaln_proj(t_emb)]
        attend = functools.partial(self.attn, rope_freqs=rope_freqs, transformer_options=transformer_options)
        for norm, part, (shift, scale, gate) in (self.norm1, attend, vectors[:3]), (self.norm2, self.mlp, vectors[3:]):
            out = part(fused.modulated_in_runs(norm, x_1SD, scale, shift, mod_segments)[0])
            x_1SD = fused.gated_in_runs(x_1SD, gate, out[None], mod_segments)
        return x_1SD[0]


FORMS: Mapping[str, tuple[str, type[Form]]] = {
    f"{ROOT}qwen_image.model.Attention": ("a4484f0e7eb52a58", FusedQwenImageAttention),
    f"{ROOT}qwen_image.model.QwenImageTransformerBlock": ("169d7285c3246d03", FusedQwenImageBlock),
    f"{ROOT}krea2.model.RMSNorm": ("b68e900c5514db28", FusedKrea2Norm),
    f"{ROOT}krea2.model.Attention": ("de893300d4a20790", FusedKrea2Attention),
    f"{ROOT}krea2.model.DoubleSharedModulation": ("40a41e6b26a6ffeb", FusedKrea2Modulation),
    f"{ROOT}krea2.model.SingleStreamBlock": ("7d8ddd79ef19b361", FusedKrea2Block),
    f"{ROOT}minimax.model.Attention": ("a0cee20f42d8e8dc", FusedMinimaxH3Attention),
    f"{ROOT}minimax.model.DiTBlock": ("1b9ce5c81241dd44", FusedMinimaxH3Block),
}
"""Name of ComfyUI's class -> (digest of the source that the form was written for, form)."""
