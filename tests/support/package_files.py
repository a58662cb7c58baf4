"""What ComfyUI's registry makes of the repository: git's files without those of .comfyignore (comfy-cli's rule)."""

import shutil
import subprocess
from pathlib import Path

from scripts.comfyui_server import PACK


def packaged() -> list[Path]:
    """Paths from the repository's root."""

    def git(*arguments: str, given: str = "") -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=PACK, input=given, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr  # 1: nothing is ignored
        return done.stdout.splitlines()

    files = git("ls-files", "--cached", "--others", "--exclude-standard")
    rules = ("-c", f"core.excludesFile={PACK / '.comfyignore'}")
    ignored = set(git(*rules, "check-ignore", "--no-index", "--stdin", given="\n".join(files)))
    return [Path(name) for name in files if name not in ignored]


def install(folder: Path) -> None:
    """Copy the package to `folder`."""
    for path in packaged():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACK / path, folder / path)
