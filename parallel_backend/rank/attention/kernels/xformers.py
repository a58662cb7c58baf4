"""xformers' memory-efficient attention, which picks among kernels of its own."""


def attend(q, k, v, mask, scale):
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(q, k, v, scale=scale)


def attend_lse(q, k, v, mask, scale):
    from xformers.ops import memory_efficient_attention_forward_requires_grad

    out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, scale=scale)
    return out, lse[..., : q.shape[1]].transpose(1, 2)  # [B, H, q], q rounded up by its CUTLASS kernel
