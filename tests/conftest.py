"""Pools of CPU ranks and a tiny model, made once for the whole session: starting eight ranks takes longer than any test.

A pool loads one model after another, as it does between prompts, so tests share ranks but no state: what would leak
from one test into the next is a defect that test_requests.py looks for.
"""

import functools
import multiprocessing
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.processes.local import LocalRanks
from parallel_backend.processes.watchdog import SILENCE_SECONDS
from testing import mini
from testing.fork_server import fork_server, started_by
from testing.thread_ranks import thread_ranks
from tests.support.pools import Pools
from tests.support.requirements import NotHere
from tests.support.starts import Starts

torch.set_num_threads(1)  # the ranks share the cores with this process
hypothesis.settings.register_profile("no timed tests", deadline=None)
hypothesis.settings.load_profile("no timed tests")

ROOT = Path(__file__).parent.parent


class RootIsNoTestPackage:
    """pytest would import the repository's own `__init__.py`, which is the pack's and needs ComfyUI."""

    @staticmethod
    def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


SCRIPTS, SERVER, BROWSER = "comfyui scripts", "comfyui server", "browser"
"""Groups of files that share a started ComfyUI, see group_of."""
LONG = (
    *("system/test_transport.py", "system/test_exactness.py", "rank/test_compile.py", "processes/test_links.py"),
    *("comfyui/test_package.py", "emulated/test_own_class.py", "emulated/test_modes.py"),
)
"""Files that go before the others, the longest first: what begins late is waited for at the end."""
LONGER = {"full": 1800, "comfyui": 1200}
"""Mark -> seconds of a test with it: long tables; scripts in ComfyUI, which end after 900 s and say what they printed."""
STARTING = ("processes", "alone", "comfyui", "ray", "gpu")
"""Marks of tests that may start rank processes. The quick tier has none of these."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated-gpus",
        help="CUDA devices in software, on a CPU build of torch, such as 'HOPPER TURING' (testing/fake_cuda.py)",
    )
    parser.addoption("--starts", default="", help="what may be started, such as 'ComfyUI 60, ranks 900': more fails")
    parser.addoption("--require", action="store_true", help="a test that would be skipped fails, unless it needs a GPU")


def pytest_configure(config: pytest.Config) -> None:
    # A plugin of its own, since a hook written here would only see what lies below this folder.
    config.pluginmanager.register(RootIsNoTestPackage())
    config.pluginmanager.register(Starts(config.getoption("starts")))
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")  # to processes of pytest -n
    if (cards := config.getoption("emulated_gpus")) and not hands_out:
        from tests.support.emulated_gpu.plugin import EmulatedGpus  # takes torch's innards, which not every torch has

        config.pluginmanager.register(EmulatedGpus(cards.split()))


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "process_pools" in fixtures or ("pools" in fixtures and not item.get_closest_marker("threads")):
            item.add_marker("processes")
        if seconds := max((seconds for mark, seconds in LONGER.items() if item.get_closest_marker(mark)), default=0):
            item.add_marker(pytest.mark.timeout(seconds))
    first = (SCRIPTS, SERVER, BROWSER, *LONG)
    items.sort(key=lambda item: first.index(group) if (group := group_of(item.path)) in first else len(first))


@functools.cache
def group_of(path: Path) -> str:
    """What one process of `pytest -n` runs: the files that share a ComfyUI together, each other file by itself."""
    text, folder = path.read_text(encoding="utf-8"), path.parent.name
    if folder == "browser":
        return BROWSER
    if folder == "comfyui" and "Inside(" not in text:  # which starts a ComfyUI of its own
        return SERVER if re.search(r"[(,] ?(session_)?server\b", text) else SCRIPTS
    return str(path.relative_to(ROOT / "tests"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`, with groups of files for its files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(ROOT / nodeid.split("::")[0])

    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Rank processes are started by tests that are marked so: no other one slips into the quick tier with them."""
    if any(item.get_closest_marker(mark) for mark in STARTING):
        return (yield)
    refusal = AssertionError("a test that starts rank processes has to be marked `processes`")
    with mock.patch.object(LocalRanks, "_start", side_effect=refusal):
        return (yield)


def seed(name: str) -> None:
    """Draws without a generator are the same in each run, and differ from test to test and from fixture to fixture."""
    torch.manual_seed(zlib.crc32(name.encode()))


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    seed(f"{fixturedef.argname}[{request.param_index}]")


def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """`--require`: a skipped test fails."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail") and not isinstance(call.excinfo.value, NotHere)
    if skipped and item.config.getoption("require") and not item.get_closest_marker("gpu"):
        report.outcome, report.longrepr = "failed", f"skipped, which --require forbids: {call.excinfo.value}"
    return report


@pytest.fixture(scope="session")
def forking(pytestconfig) -> Iterator[BaseContext]:
    """What starts ranks in no time. With a real GPU they are spawned: a fork server's imports may have begun CUDA, which a
    forked process cannot use."""
    if torch.cuda.is_available() and not pytestconfig.getoption("emulated_gpus"):
        yield multiprocessing.get_context("spawn")
        return
    with fork_server() as context:
        yield context


@pytest.fixture(scope="module", autouse=True)
def ready_made_ranks(forking) -> Iterator[None]:
    """Ranks start in no time, but for the tests that want them `spawned`."""
    with started_by(forking):
        yield


@pytest.fixture
def spawned() -> Iterator[None]:
    """Ranks that this test starts are spawned, as they really are."""
    with started_by(multiprocessing.get_context("spawn")):
        yield


@pytest.fixture(scope="session")
def process_pools(forking) -> Iterator[Pools]:
    """Pools of ranks in processes. They end before what they were forked from."""
    pools = Pools(LocalRanks)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def thread_pools() -> Iterator[Pools]:
    """Pools of ranks in threads of this process, see thread_ranks.py."""
    with thread_ranks() as start:
        pools = Pools(start, silence=10 * SILENCE_SECONDS)
        yield pools
        pools.close()


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """`pools(n)`: a Pool of n CPU ranks that is known to work. In threads in a file that is marked so, else in processes, of
    which two stay for the next file."""
    threads = request.node.get_closest_marker("threads")
    found = request.getfixturevalue("thread_pools" if threads else "process_pools")
    yield found
    found.end_larger_than(1 if threads else 2)


@pytest.fixture(scope="session")
def mini_model() -> torch.nn.Module:
    """The tiny model of the mini class, with random weights: the reference."""
    return mini.random_model()


@pytest.fixture(scope="session")
def mini_file(mini_model, tmp_path_factory) -> Path:
    """The same weights as a file."""
    return mini.save(mini_model, tmp_path_factory.mktemp("mini") / "tiny.safetensors")


@pytest.fixture(scope="session")
def given() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A call of the tiny model: latent, timestep, conditioning."""
    return mini.inputs()


@pytest.fixture(scope="session")
def expected(mini_model, given) -> torch.Tensor:
    """What the class gives for it."""
    return mini.reference(mini_model, *given)


@pytest.fixture(scope="module")
def remote(pools, mini_file) -> Callable[..., RemoteTransformer]:
    """`remote(Degrees(...), dtype=..., fresh=...)`: the tiny model on ranks."""
    return functools.partial(pools.mini, mini_file)
