"""comfy-kitchen's int8 attention, ComfyUI's --use-ck-attention. It returns no log-sum-exp."""


def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from comfy_kitchen import int8_attention

    q_BHQD, k_BHKD, v_BHKD = (x.transpose(1, 2) for x in (q_BQHD, k_BKHD, v_BKHD))
    mask_B11K = None if mask_BK is None else mask_BK[:, None, None]
    return int8_attention(q_BHQD, k_BHKD, v_BHKD, scale=scale, attn_mask=mask_B11K).transpose(1, 2)
