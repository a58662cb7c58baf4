"""Code that ranks have compiled is read from folders alone that nobody else could have written to."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from parallel_backend.rank.start.compiled_code import FOLDERS, TEMPORARY, keep_compiled_code_private

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX's owners and modes")
ROOT = Path(__file__).resolve().parents[2]
TORCH = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    return home


@pytest.fixture
def shared(tmp_path) -> Path:
    """As the machine's temporary folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


def after(scratch: Path | None = None, **given: object) -> dict[str, str]:
    environment = {name: str(value) for name, value in given.items()}
    keep_compiled_code_private(environment, scratch)
    return environment


def test_it_is_kept_in_the_users_cache(home):
    ours = home / ".cache" / "parallel_dit"
    usual = {name: str(ours / folder) for name, folder in FOLDERS.items()}
    assert after() == usual
    assert ours.stat().st_mode & 0o777 == 0o700
    assert tempfile.gettempdir() == str(ours / "tmp")
    assert after() == usual  # at the second start
    other = home / "other"
    assert after(XDG_CACHE_HOME=other)[TORCH] == str(other / "parallel_dit" / "torch")


def test_a_users_own_folders_stay(home, shared):
    own, made = home / "own", shared / "not there yet"
    own.mkdir(mode=0o755)
    given = {TORCH: str(own), "TRITON_CACHE_DIR": str(made), TEMPORARY: str(own)}
    assert after(**given) == given
    assert made.stat().st_mode & 0o777 == 0o700
    link = home / "link"
    link.symlink_to(own)
    assert after(**{TORCH: link})[TORCH] == str(link)


def test_a_folder_that_others_can_write_to_is_not_used(home, shared, caplog):
    given = shared / "torchinductor_me"
    given.mkdir()
    given.chmod(0o777)
    assert after(**{TORCH: given, TEMPORARY: shared})[TORCH] == str(home / ".cache" / "parallel_dit" / "torch")
    assert f"{TORCH} is not used, because others can write to {given}" in caplog.text
    assert after(**{TEMPORARY: shared})[TEMPORARY] == str(home / ".cache" / "parallel_dit" / "tmp")


def test_a_folder_of_another_user_is_not_used(home, shared, caplog, monkeypatch):
    given = shared / "torchinductor_me"
    given.mkdir(mode=0o700)
    (home / ".cache" / "parallel_dit").mkdir(parents=True, mode=0o700)
    scratch = home / "scratch"
    scratch.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # so nothing here is this user's
    environment = after(scratch, **{TORCH: given})
    assert environment[TORCH] == str(scratch / "torch")
    assert environment[TEMPORARY] == str(scratch / "tmp")
    assert f"{TORCH} is not used" in caplog.text


@pytest.mark.slow
def test_torch_reads_nothing_from_a_folder_that_another_user_has_made(home, shared):
    """All of a rank's own: the cache with pickles and libraries, Triton's, and the compiled headers."""
    code = (
        "import getpass, pathlib, sys\n"
        "from datetime import timedelta\n"
        "import parallel_backend.rank.worker as worker\n"
        "from parallel_backend.rank.start.entry import main\n"
        "from parallel_backend.wire.rank_settings import RankSettings\n"
        "def run(*_arguments):\n"
        "    from torch._inductor import codecache\n"
        "    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir\n"
        "    print(cache_dir(), default_cache_dir(), triton_cache_dir(0), codecache._HEADER_DIR, sep='\\n')\n"
        "worker.run = run\n"
        "main(RankSettings(('cpu',), 1, timedelta(minutes=1), rank=0, rendezvous=('', 0)), None)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (*FOLDERS, "XDG_CACHE_HOME")}
    planted = shared / "torchinductor_me"
    planted.mkdir()
    planted.chmod(0o777)
    names = {"HOME": str(home), "TMPDIR": str(shared), "LOGNAME": "me"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | names, capture_output=True, text=True, check=True
    )
    places = done.stdout.split()
    assert len(places) == 4
    assert all(Path(place).is_relative_to(home / ".cache" / "parallel_dit") for place in places)
