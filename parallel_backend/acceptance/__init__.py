"""The self-test: checks of a machine that take a few minutes, as one page of text and one JSON.

`python -m parallel_backend.acceptance`, and the node Parallel Self-Test. docs/gpu.md says what each check means.
"""
