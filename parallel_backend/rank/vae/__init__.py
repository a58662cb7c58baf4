"""A decoder or encoder of a VAE on the ranks, each with a band of rows or columns. Exact: no tiles, no blending.

As in DistVAE (github.com/xdit-project/DistVAE, which xDiT uses), every rank runs ComfyUI's own class on its band. For a
class made for independent tiles (MiniMax H3), each rank has whole tiles instead.
"""
