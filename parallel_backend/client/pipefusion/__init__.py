"""PipeFusion on the sampler's side: bands, their order and their threads."""
