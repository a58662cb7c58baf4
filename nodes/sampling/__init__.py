"""PipeFusion under ComfyUI's own samplers: the latent is cut into bands, each with its own sampler."""
