"""LoRA and other patches of weights, as data for the ranks; nodes that save or merge get patched weights from here.

Patches are tried on weights without values first, and what does not fit is said.
"""
