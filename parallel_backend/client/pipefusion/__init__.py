"""PipeFusion from the sampler's side: bands, their order, their threads."""
