"""CUDA devices that are not there: tensors without memory, for counting what a rank's own code does with real sizes."""
