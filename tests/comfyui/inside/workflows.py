"""Bundled workflows in API form, held to the nodes of ComfyUI as its server does before it runs one. Run by serve.py."""

import asyncio
from typing import Any

import execution
from boot import Results

import nodes


def main(results: Results, prompts: dict[str, dict[str, Any]]) -> None:
    asyncio.run(nodes.init_builtin_extra_nodes())

    def refusals(prompt: dict[str, Any]) -> list[Any]:
        """What is wrong with the prompt and with its nodes."""
        _, error, _, of_nodes = asyncio.run(execution.validate_prompt("prompt", prompt, None))
        return [error, of_nodes]

    for name, prompt in prompts.items():
        results.case(name, lambda prompt=prompt: refusals(prompt))
