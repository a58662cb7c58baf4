"""The rooms of the code: who may import whom, and how much may stand in one file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 400
"""Lines of a module, beyond which it has more than one job."""


def test_no_import_leads_upward_or_round_in_a_circle():
    """The contracts of pyproject.toml."""
    command = "import sys; from importlinter.cli import lint_imports_command as c; c(['--no-cache', '--no-logo'])"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("folder", ["parallel_backend", "nodes"])
def test_no_module_is_too_long_to_be_read(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert {str(path): length for path, length in lengths.items() if length > LONGEST} == {}
