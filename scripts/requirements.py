"""Prints the requirements that the Python which runs this lacks, or has in another version, one a line, for pip.

python scripts/requirements.py benchmarks               the pack's own and those of an extra in pyproject.toml
python scripts/requirements.py --constrained dev ray     at the versions of constraints.txt
"""

import argparse
import importlib.metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def required(extras: list[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def constraints() -> dict[str, str]:
    """Name -> version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def installed(requirement: str, pinned: str | None) -> bool:
    """`pinned`: the only version that will do. None: any that meets the requirement."""
    try:
        from packaging.requirements import Requirement  # diffusers brings it: where it is absent, so is diffusers

        version = importlib.metadata.version(name_of(requirement))
    except ImportError:
        return False
    return version == pinned if pinned else Requirement(requirement).specifier.contains(version, prereleases=True)


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help="of pyproject.toml")
    parser.add_argument("--constrained", action="store_true")
    options = parser.parse_args()
    pins = constraints() if options.constrained else {}
    for line in required(options.extras):
        if not installed(line, pin := pins.get(name_of(line))):
            print(f"{name_of(line)}=={pin}" if pin else line)


if __name__ == "__main__":
    main()
