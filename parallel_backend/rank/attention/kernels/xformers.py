"""xformers' memory-efficient attention, which picks one of several kernels by itself."""


def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(q_BQHD, k_BKHD, v_BKHD, scale=scale)


def attend_lse(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from xformers.ops import memory_efficient_attention_forward_requires_grad

    out_BQHD, lse_BHQ = memory_efficient_attention_forward_requires_grad(q_BQHD, k_BKHD, v_BKHD, scale=scale)
    return out_BQHD, lse_BHQ[..., : q_BQHD.shape[1]].transpose(1, 2)  # its CUTLASS kernel rounds the number of queries up
