"""Transformer classes for families whose files diffusers' classes do not fit. Most are subclasses of diffusers'."""
