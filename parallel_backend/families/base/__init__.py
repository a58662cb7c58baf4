"""Records that rooms share: latents as tokens, a micro-step's inputs, tensor parallelism as data."""
