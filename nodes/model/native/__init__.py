"""Facts about the native model, which ComfyUI itself would run: its forward, and the names of its parts and tensors. Other
nodes' wrappers and look-ups get the parts of it that they expect from here."""
