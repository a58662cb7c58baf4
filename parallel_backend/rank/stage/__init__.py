"""The model on a rank: its stage's blocks, their weights, tensor shards, LoRA and compilation."""
