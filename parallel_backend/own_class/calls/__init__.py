"""A call of a class: its arguments as tensors and numbers, by name."""
