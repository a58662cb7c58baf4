"""Attention on a rank: kernels, and Ulysses, ring and stale keys around them."""
