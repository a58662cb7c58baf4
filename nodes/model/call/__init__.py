"""Answers a call of the model: the native MODEL's stub checks it and hands it to the ranks. The trial of calls of ComfyUI's
own class is here too."""
