"""What is known of the native model, which ComfyUI itself would run: its forward, and the names of its parts and tensors.

Other nodes' wrappers and look-ups get from here what they expect of it.
"""
