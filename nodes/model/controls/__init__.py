"""ControlNets and other networks that add to the model's blocks. These networks run in ComfyUI's process. Ranks get their
residuals."""
