"""A decoder or encoder of a VAE on the ranks, each with a band of rows or columns. Exact: no tiles, no blending.

As in DistVAE (github.com/xdit-project/DistVAE, which xDiT uses), every rank runs the part on its band. Convolutions get the
rows next to the band from the neighbours. GroupNorms have one mean and variance over all ranks. Attention layers have the
rank's queries and all ranks' keys and values. Upsampling is local. Videos come in pieces of some frames. A part that is made
for independent tiles (MiniMax H3) has whole tiles on each rank instead.
"""
