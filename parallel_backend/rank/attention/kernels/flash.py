"""FlashAttention 2: flash_attn_func of the package flash_attn (Dao-AILab/flash-attention), from release 2.0 on."""


def attend(q, k, v, mask, scale):
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale)


def attend_lse(q, k, v, mask, scale):
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True)
    return out, lse[..., : q.shape[1]].transpose(1, 2)  # [B, H, q]; early releases rounded q up
