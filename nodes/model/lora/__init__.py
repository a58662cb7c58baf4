"""LoRA and other patches of weights, as data for the ranks. Nodes that save or merge get patched weights from here. Patches
are first tried on weights without values, and the user is told which do not fit."""
