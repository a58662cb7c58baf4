"""Transformers of ours, where diffusers has none or lacks what the files need. A family names its class's module."""
