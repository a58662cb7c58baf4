"""ComfyUI's VAEs on the ranks: which of them can be cut, and the nodes that do."""
