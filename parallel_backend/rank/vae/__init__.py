"""A decoder or encoder of a VAE on the ranks, each with a band of rows or columns. Exact: no tiles, no blending.

As in DistVAE (github.com/xdit-project/DistVAE, which xDiT uses), every rank runs the part on its band. The part is
ComfyUI's own class. One that is made for independent tiles (MiniMax H3) has whole tiles on each rank instead.
"""
