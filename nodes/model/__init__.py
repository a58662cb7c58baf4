"""The native MODEL without weights: ComfyUI's own BaseModel whose diffusion_model asks the ranks."""
