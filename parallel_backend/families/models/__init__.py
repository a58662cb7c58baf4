"""Transformer classes for families whose files diffusers' classes do not fit: a class for each, or a subclass of
diffusers'."""
