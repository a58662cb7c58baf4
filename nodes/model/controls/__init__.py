"""ControlNets and other networks that add to the model's blocks.

Those networks run in ComfyUI's process, and the ranks get their residuals.
"""
