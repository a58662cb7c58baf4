"""FlashAttention 2: flash_attn_func of the package flash_attn (Dao-AILab/flash-attention), from release 2.0 on."""


def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from flash_attn import flash_attn_func

    return flash_attn_func(q_BQHD, k_BKHD, v_BKHD, softmax_scale=scale)


def attend_lse(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from flash_attn import flash_attn_func

    out_BQHD, lse_BHQ, _ = flash_attn_func(q_BQHD, k_BKHD, v_BKHD, softmax_scale=scale, return_attn_probs=True)
    return out_BQHD, lse_BHQ[..., : q_BQHD.shape[1]].transpose(1, 2)  # early releases round the number of queries up
