"""Attention on a rank: kernels, and Ulysses, ring and stale keys around them.

Names of tensors here and in rank/comm end with the tensor's shape, one letter for each axis: q_BsHD is [B, s, H, D].

    B, b     batch entries; b: those of a micro-step, where the K/V buffer has B
    S, s     tokens of all ranks of the axis that a transfer is over; s: of this rank. In a K/V buffer S: of the sequence
    Q, K     query tokens and key tokens of a call, which may differ in number
    H, h     heads of the layer on this tensor rank; h: of this Ulysses rank, or of one of its head groups
    D        channels of a head
    C        channels of a token
    N, n     values in one dimension; n: a part of N
    G, g     groups of neighbouring values; g: values of a group
    Y, y     bytes that values are packed into; y: a part of Y
    e        values packed into one byte
    R        ranks
    1, 2, .. axes of that size. The first 2 of 2BsHD: keys, values
"""
