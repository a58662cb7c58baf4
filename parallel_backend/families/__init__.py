"""Classes of models: ComfyUI's own and the bundled one, and how ranks share them out."""
