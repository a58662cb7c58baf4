"""A call of the model: the native MODEL's stub checks it and hands it to the ranks.

For ComfyUI's own class, the trial of its calls is here too.
"""
