"""Ranks compute by the settings of torch that ComfyUI's process has, each row of the table changed once."""

import threading
from datetime import timedelta
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.core.torch_settings import (
    ATTRIBUTES,
    DETERMINISTIC,
    FUNCTIONS,
    WARN_ONLY,
    read_settings,
    write_settings,
)
from parallel_backend.processes.pool import Pool
from parallel_backend.rank import worker
from parallel_backend.wire.rank_settings import RankSettings, StartSettings

OTHER = {"backends.cuda.matmul.fp32_precision": "tf32", "backends.cudnn.conv.fp32_precision": "ieee"}
OTHER |= {"get_float32_matmul_precision": "high"}


@pytest.fixture
def before():
    """This process's settings, which it has again after the test."""
    found = read_settings()
    yield found
    write_settings(found)


class Started(Exception):
    """Ranks were to be started, with these settings."""


def start(settings: StartSettings) -> None:
    raise Started(settings.of_rank(0, ("", 0)))


@pytest.mark.parametrize("name", [*ATTRIBUTES, *FUNCTIONS, DETERMINISTIC, WARN_ONLY])
def test_a_rank_has_comfyuis_settings_of_torch(before, monkeypatch, name):
    if name not in before:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    write_settings({name: OTHER.get(name, before[name] is False), DETERMINISTIC: name in (DETERMINISTIC, WARN_ONLY)})
    changed = read_settings()
    assert changed[name] != before[name]
    with pytest.raises(Started) as started:
        Pool(("cpu",), start=start)
    write_settings(before)
    settings: RankSettings = started.value.args[0]

    found = []
    monkeypatch.setattr(worker.os, "_exit", found.append)  # with it a rank ends after an error
    ours, theirs = Pipe()
    serving = lambda *_: SimpleNamespace(serve=lambda: found.append(read_settings()))  # noqa: E731
    rank = RankSettings(("cpu",), 1, timedelta(1), torch_settings=settings.torch_settings, rank=0, rendezvous=("", 0))
    thread = threading.Thread(target=worker.run, args=(rank, theirs, serving))
    thread.start()
    thread.join(30)
    ours.close()
    assert found == [changed]


def test_a_setting_that_torch_lacks_is_left_and_named(before, caplog):
    write_settings({**before, "backends.cuda.matmul.of_another_version": True, "backends.cudnn.enabled": False})
    assert read_settings() == {**before, "backends.cudnn.enabled": False}
    assert "torch.backends.cuda.matmul.of_another_version could not be set to" in caplog.text
