"""A test that hangs fails with stacks: tests/support/time_limit.py."""

import subprocess
import sys
import threading
import types

import pytest

from scripts.comfyui_server import PACK
from tests.support.time_limit import LONGER, SECONDS, limit_of, limited

FOREVER = 60


def test_a_wait_that_does_not_end_fails_with_the_stacks_of_all_threads():
    over = threading.Event()
    other = threading.Thread(target=over.wait, args=(FOREVER,), name="the one that is waited for")
    other.start()
    with pytest.raises(pytest.fail.Exception) as failure, limited(0.2, FOREVER, 2):
        other.join()
    over.set()
    other.join()
    text = str(failure.value)
    assert "longer than 0.2 s" in text
    assert "the one that is waited for:" in text
    assert "MainThread:" in text
    assert "other.join()" in text


def test_a_test_that_catches_all_and_waits_again_fails_again():
    with pytest.raises(pytest.fail.Exception), limited(0.1, 0.1, 2):
        try:
            threading.Event().wait(FOREVER)
        finally:
            threading.Event().wait(FOREVER)


def test_an_end_in_time_leaves_no_alarm():
    with limited(0.2, FOREVER, 2):
        pass
    assert not threading.Event().wait(0.4)


def test_a_call_that_no_signal_ends_ends_the_process_with_its_stacks():
    code = (
        "import signal, threading\n"
        "from tests.support.time_limit import limited\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        f"with limited(0.1, 0.1, 2): threading.Event().wait({FOREVER})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACK, capture_output=True, text=True, timeout=FOREVER)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in wait" in done.stderr


@pytest.mark.parametrize(
    ("marks", "seconds"),
    [((), SECONDS), (("comfyui",), LONGER["comfyui"]), (("comfyui", "full"), LONGER["full"]), (("processes",), SECONDS)],
)
def test_limits(marks, seconds):
    item = types.SimpleNamespace(get_closest_marker=lambda mark: mark if mark in marks else None)
    assert limit_of(item) == seconds
