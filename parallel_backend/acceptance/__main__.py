"""The self-test on the command line.

    python -m parallel_backend.acceptance
    python -m parallel_backend.acceptance --out result.json
    python -m parallel_backend.acceptance --devices cpu,cpu --only modes,links

Without --devices: all GPUs; with one GPU, two ranks on it; without a GPU, two CPU ranks. The exit status is 1 if a check
failed. docs/gpu.md says what each check means.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    """Parse the options, with the self-test's `settings` among them. Help is printed without importing torch."""
    parser = argparse.ArgumentParser(
        prog="python -m parallel_backend.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = lambda text: tuple(part.strip() for part in text.split(","))  # noqa: E731
    parser.add_argument("--devices", default="auto", help="a list such as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--only", type=names, help="a list of checks, such as kernels,modes")
    options = parser.parse_args(command_line)
    if importlib.util.find_spec("torch") is None:
        parser.error("torch is not installed; ComfyUI's Python has it. Elsewhere: python -m pip install torch")
    from parallel_backend.core.device_choice import Host, all_gpus, is_auto, possible_devices

    from .checks import CHECKS
    from .session import Settings, at_least_two

    if unknown := set(options.only or ()) - set(CHECKS):
        parser.error(f"--only: no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    try:
        devices = possible_devices(options.devices, Host("cuda" if all_gpus() else "cpu"))
        options.settings = Settings(at_least_two(devices) if is_auto(options.devices) else devices)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(command_line: list[str] | None = None) -> int:
    options = arguments(command_line)
    from .checks import FAILED, Result, run
    from .report import describe, document_of, dumps

    started = time.perf_counter()

    def progress(done: int, total: int, name: str) -> None:
        if name:
            sys.stderr.write(f"{time.perf_counter() - started:6.0f} s  {done + 1} of {total}: {name}\n")

    def keep(results: Sequence[Result]) -> None:
        """Write the results so far, so that they are not lost if the machine hangs in a later check or is cut off."""
        if options.out is not None:
            document = document_of(options.settings, results, time.perf_counter() - started)
            options.out.write_text(dumps(document), encoding="utf-8")

    results = run(options.settings, progress=progress, only=options.only, found=keep)
    document = document_of(options.settings, results, time.perf_counter() - started)
    sys.stdout.write(describe(document) + "\n")
    if options.out is not None:
        sys.stdout.write(f"JSON: {options.out}\n")
    return int(document["summary"][FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
