"""The self-test: checks of a machine that take a few minutes. The result is one page of text and one JSON. It is run by
`python -m parallel_backend.acceptance`, or the node Parallel Self-Test. docs/gpu.md explains each check."""
