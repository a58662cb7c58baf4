"""ComfyUI's own templates, headless and small: the same latents with our loader as with ComfyUI's."""
