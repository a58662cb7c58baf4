"""ComfyUI's own class of a model on ranks: by stages, split batch, tensor parallelism, Ulysses, ring and patches.

Prologue and epilogue run whole on every rank, and the blocks are shared out, in bands (PipeFusion) too. A trial
proves it for the arguments of the actual call (trials/trial.py), before any weights are loaded.
"""
