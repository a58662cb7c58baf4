"""The native MODEL without weights: ComfyUI's own BaseModel whose diffusion_model asks the ranks.

Here are the MODEL's patcher and what acts on a whole MODEL. Its rooms, each importing only earlier ones:
native and lora, run, controls, patches, loading, call.
"""
