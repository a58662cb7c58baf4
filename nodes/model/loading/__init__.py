"""What is needed to make a MODEL from a file: its layout, the source of its weights, its class and left-over tensors.

Proofs of how ComfyUI's own class can be shared out are kept and shipped here.
"""
