"""A call of a model's class as data: its arguments as tensors, numbers and strings, by name."""
