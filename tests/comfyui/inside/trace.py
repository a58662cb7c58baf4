"""Parallel Trace on ranks on which nothing has run. Run by serve.py."""

from boot import Results, node


def main(results: Results) -> None:
    results.case("before any sampler", lambda: node("ParallelTrace", "trace"))
