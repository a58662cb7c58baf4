"""A rank's part of a model: its stage's blocks, their weights, tensor shards, LoRA and compilation."""
