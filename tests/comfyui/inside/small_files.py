"""Writes files of small models. Run by serve.py."""

from boot import Results
from small_cases import small


def main(_results: Results, names: list[str]) -> None:
    for name in names:
        with small(name):
            pass
