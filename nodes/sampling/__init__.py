"""PipeFusion under ComfyUI's own samplers: the latent in bands, one sampler each."""
