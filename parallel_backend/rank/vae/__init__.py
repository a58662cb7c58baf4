"""An image VAE's decoder on the ranks, in bands of the latent's rows. Exact: no tiles, no blending.

As in DistVAE (github.com/xdit-project/DistVAE, which xDiT uses): every rank runs the decoder on its own rows. Convolutions
get the row beyond their band from the neighbour, GroupNorms have one mean and variance over all ranks, and the one attention
has each rank's own queries and all ranks' keys and values. Upsampling is local. What a rank computes and holds falls with
the number of ranks.
"""
