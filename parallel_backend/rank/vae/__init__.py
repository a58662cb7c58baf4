"""An image VAE's decoder on the ranks, each with a band of the latent's rows. Exact: no tiles, no blending.

As in DistVAE (github.com/xdit-project/DistVAE, which xDiT uses), every rank runs the decoder on its own rows. Convolutions
get the rows next to the band from the neighbours. GroupNorms have one mean and variance over all ranks. The one attention
layer has the rank's queries and all ranks' keys and values. Upsampling is local.
"""
