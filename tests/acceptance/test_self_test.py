"""The self-test's parts without ranks: statuses, JSON and schema, the page of text, and what is read of a machine."""

import contextlib
import dataclasses
import json
import socket
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from parallel_backend.acceptance import checks, machine, modes, own_model, report, transports
from parallel_backend.acceptance.__main__ import arguments, main
from parallel_backend.acceptance.report import describe, verdict
from parallel_backend.acceptance.session import Findings, Host, NotLookedAt, OwnModel, SelfTestSession, Settings
from parallel_backend.client.transports import KeptTransports
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.processes.pool import RankError
from parallel_backend.quickstart.model import WEIGHTS, mini_flux
from parallel_backend.rank.attention.kernels import sdpa
from parallel_backend.wire.rank_settings import (
    BY_NCCL,
    P2P_EVERYWHERE,
    P2P_OVER_NVLINK,
    WITHOUT_P2P,
    SelfTest,
    Transport,
)
from testing import mini
from testing.fake_cuda import ADA, AMPERE, fake_cuda

CPUS = Settings(("cpu", "cpu"))
SCHEMA = json.loads(report.SCHEMA.read_text())


def valid(found: dict) -> None:
    """jsonschema.ValidationError if it is not of the form that the package promises."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(report.dumps(found)))


def look(monkeypatch, check, session: SelfTestSession | None = None) -> checks.Result:
    monkeypatch.setitem(checks.CHECKS, "made up", ("a check of the test's own", check))
    return checks.look("made up", session or SelfTestSession(CPUS))


def measures(figure: float, limit: float):
    return lambda session, findings: findings.at_most("figure", figure, limit)


def cannot(_session, findings: Findings) -> None:
    findings.note("seen so far", 3)
    raise NotLookedAt("there is none")


def fails(_session, _findings) -> None:
    raise KeyError("what nobody thought of")


@pytest.mark.parametrize(
    ("check", "status", "why"),
    [
        (measures(0.1, 0.2), checks.PASSED, ""),
        (measures(0.3, 0.2), checks.FAILED, "figure is 0.3, above its limit of 0.2"),
        (measures(float("nan"), 0.2), checks.FAILED, "figure is nan, above its limit of 0.2"),
        (cannot, checks.NOT_LOOKED_AT, "there is none"),
        (fails, checks.FAILED, "KeyError: 'what nobody thought of'"),
    ],
)
def test_what_comes_of_a_check(monkeypatch, check, status, why):
    """Each status with its reason, in the form of the schema."""
    result = look(monkeypatch, check)
    assert result.status == status
    assert why in result.why
    assert bool(result.why) == (status != checks.PASSED)
    found = report.document_of(CPUS, [result], 1.0)
    valid(found)
    assert found["summary"] == {name: int(name == status) for name in checks.STATUSES}
    said = {
        checks.PASSED: "passed: 1 of 1 checks",
        checks.FAILED: "FAILED: ",
        checks.NOT_LOOKED_AT: "passed: 0 of 1 checks, 1 not",
    }
    assert verdict(found).startswith(f"self-test {said[status]}")
    assert why in describe(found)


def test_cancel_ends_the_whole_and_counts_as_no_failure(monkeypatch):
    def poll() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "CHECKS", {"waits": ("", lambda session, findings: session.poll()), "never": ("", fails)})
    with pytest.raises(KeyboardInterrupt):
        checks.run(CPUS, poll=poll)


def test_nothing_says_whose_machine_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(report.Path, "home", lambda: tmp_path / "home" / "jane.doe")
    monkeypatch.setattr(report, "_users", lambda: {"jane.doe"})
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-tower")
    text = (
        f"{tmp_path}/home/jane.doe/ComfyUI/x.py line 3; /mnt/janes disk/jane.doe/secret/models/flux.safetensors; "
        r"C:\Users\jane.doe\secret\ComfyUI\nodes.py; janes-tower said no; jane.doe did; a/b, 1/2 and /dev/shm stay"
    )
    found = report.impersonal(text)
    assert "alice" not in report.impersonal("see /home/alice/ComfyUI and C:\\Users\\alice\\ComfyUI, /srv/home/alice/x/y")
    assert not [word for word in ("jane.doe", "janes-tower", "secret") if word in found]
    assert "~/ComfyUI/x.py line 3" in found
    assert ".../models/flux.safetensors" in found
    assert ".../ComfyUI/nodes.py" in found
    assert found.endswith("a/b, 1/2 and /dev/shm stay")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/home/jane.doe/log")
    host = Host("ComfyUI 1.2.3", ("--base-directory", str(tmp_path / "home" / "jane.doe" / "ComfyUI")))
    results = checks.run(CPUS, host, only=("system",))
    text = report.dumps(report.document_of(CPUS, results, 1.0))
    assert "jane.doe" not in text
    assert '"NCCL_DEBUG_FILE": "~/log"' in text
    assert '"~/ComfyUI"' in text


@pytest.mark.parametrize(("world", "products"), [(3, set()), (8, {(2, 4)})])
def test_every_mode_is_tried_and_one_product(world, products):
    found = modes.modes_of(world)
    assert {degrees.world for degrees in found} == {world}
    alone = [degrees for degrees in found if max(degrees.sizes) == world]
    assert {AXES[degrees.sizes.index(world)] for degrees in alone} == set(AXES)
    assert len(alone) == len(AXES)
    assert {(degrees.pipe, degrees.ulysses) for degrees in found if degrees not in alone} == products


class Computes:
    """Stands in for a model on ranks: a call's output, moved by so much."""

    def __init__(self, output: torch.Tensor, by: float):
        self.output = output * (1 + by)

    def predict(self, *_call) -> torch.Tensor:
        return self.output


@pytest.fixture
def modes_session(monkeypatch) -> SelfTestSession:
    """One rank's outputs are given, and runs in bands pass."""
    session, whole = SelfTestSession(CPUS), torch.randn(2, 16, 15, 11, generator=torch.Generator().manual_seed(0))
    one = {"fp32": whole, "bf16": whole * 1.008}
    monkeypatch.setattr(modes, "_one_rank", lambda *_: one)
    monkeypatch.setattr(modes, "sample_whole", lambda *_: whole)
    monkeypatch.setattr(modes, "sample_in_bands", lambda *_, **__: (whole, []))
    monkeypatch.setattr(session, "load", lambda degrees, dtype: Computes(one[dtype], 0.0))
    return session


@pytest.mark.parametrize(
    ("dtype", "by", "status"),
    [("fp32", 0.0, "passed"), ("fp32", 1e-4, "failed"), ("bf16", 0.2, "failed")],
)
def test_a_mode_that_differs_from_one_rank_is_found(monkeypatch, modes_session, dtype, by, status):
    right = modes_session.load

    def load(degrees, kind):
        return Computes(right(degrees, kind).output, by if (kind, degrees.tensor) == (dtype, 2) else 0.0)

    monkeypatch.setattr(modes_session, "load", load)
    result = checks.look("modes", modes_session)
    assert result.status == status
    assert ("tensor_parallel_degree 2" in result.why) == (status == "failed")


def test_a_mode_that_fails_or_cannot_be_leaves_the_others_to_be_looked_at(monkeypatch, modes_session):
    right = modes_session.load

    def load(degrees, kind):
        if degrees.ring == 2:
            raise RankError("Parallel DiT: rank 1 (cuda:1) lost its peer")
        if degrees.ulysses == 2:
            raise ValueError("tensor_parallel_degree is 2, but this model has 1 attention heads")
        return right(degrees, kind)

    monkeypatch.setattr(modes_session, "load", load)
    result = checks.look("modes", modes_session)
    assert result.status == checks.FAILED
    assert result.why == "ring_degree 2, fp32: Parallel DiT: rank 1 (cuda:1) lost its peer"
    assert [text.partition(":")[0] for text in result.left_out] == ["ulysses_degree 2, fp32"]
    assert len([name for name in result.figures if name.endswith((", fp32", ", bf16"))]) == len(AXES) - 2 + 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({True: 1 + 1e-7}, "transfers that overlap with computation change the result"),
        ({True: 1.5, False: 1.5}, "a run is 0.5"),
    ],
)
def test_a_run_that_differs_with_its_transfers_or_from_one_rank_is_found(monkeypatch, modes_session, other, why):
    whole = modes_session.load(Degrees(), "fp32").output
    monkeypatch.setattr(modes, "sample_in_bands", lambda *_, overlap=None: (whole * other.get(overlap, 1.0), []))
    said = checks.look("modes", modes_session).why.splitlines()
    assert said and all(why in text for text in said)


def test_a_users_model_is_compared_with_the_first_run_that_works(monkeypatch):
    """The host's own, here; of the modes one does not fit, and one is wrong."""
    config, calls = mini.config_of(WEIGHTS), []

    @contextlib.contextmanager
    def native(checkpoint):
        def predict(x, timestep, tensors):
            calls.append(float(timestep[0]))
            return torch.zeros_like(x)

        yield predict

    by = {"one rank": 0.0, "ulysses_degree 2": 0.5, "tensor_parallel_degree 2": 0.0, "pipefusion_degree 2": 0.2}

    def on_ranks(session, problem, degrees):
        if str(degrees) not in by:
            raise ValueError("this does not fit")
        figures = {"seconds_per_step": 0.5, "peak_bytes": [10**9] * degrees.world}
        return problem.noise * (1 + by[str(degrees)]), degrees.pipe == 1, figures

    model = OwnModel(WEIGHTS, mini_flux(**config), mini.example(config, 16, 16), (1.0, 0.5))
    session = SelfTestSession(dataclasses.replace(CPUS, model=model, steps=3), Host("ComfyUI 9", native=native))
    monkeypatch.setattr(session, "end_ranks", lambda: None)
    monkeypatch.setattr(own_model, "_on_ranks", on_ranks)
    result = checks.look("model file", session)
    assert [run["mode"] for run in result.figures["runs"]] == ["ComfyUI 9, no ranks", *by]
    assert len(calls) == 2 + 3  # a rehearsal first
    assert [run.get("dB", 200.0) >= 35 for run in result.figures["runs"]] == [True, True, False, True, False]
    assert result.status == checks.FAILED
    assert [name for name in by if f"{name} is" in result.why] == ["ulysses_degree 2"]
    assert [text.partition(":")[0] for text in result.left_out] == ["ring_degree 2"]
    found = report.document_of(session.settings, [dataclasses.replace(result, status=checks.PASSED, why="")], 1.0)
    valid(found)
    assert str(WEIGHTS.parent) not in report.dumps(found)


def test_wrong_attention_is_found(monkeypatch):
    attend = sdpa.attend
    monkeypatch.setattr(sdpa, "attend", lambda *given: attend(*given) * 1.2)
    result = checks.look("kernels", SelfTestSession(CPUS))
    assert result.status == checks.FAILED
    assert "torch SDPA, fp32 on cpu: heads of 16 (its results are wrong), heads of 64" in result.why
    assert "log-sum-exp" not in result.why


def test_two_gpus_as_the_check_of_the_machine_sees_them(monkeypatch):
    with fake_cuda(AMPERE, ADA) as cuda:
        cuda.hold_elsewhere(1 << 30, 1)
        settings = arguments([]).settings
        assert settings.devices == ("cuda:0", "cuda:1")
        result = checks.look("system", SelfTestSession(settings))
    assert result.status == checks.PASSED, result.why
    first, second = result.figures["gpus"]
    assert (first["name"], first["capability"]) == ("NVIDIA GeForce RTX 3090", [8, 6])
    assert second["memory_bytes"] - second["free_bytes"] == 1 << 30
    assert result.figures["peers"] == {"0-1": True, "1-0": True}
    found = report.document_of(settings, [result], 1.0)
    valid(found)
    assert "gpus: name NVIDIA GeForce RTX 4090, capability [8, 9], memory_bytes 25" in describe(found)


def test_one_gpu_is_shared_by_two_ranks():
    with fake_cuda(ADA):
        assert arguments([]).settings.devices == ("cuda:0", "cuda:0")
    assert arguments([]).settings.devices == ("cpu", "cpu")


FACTS = {
    "transport": "nccl",
    "peers": {"0-1": False, "1-0": False},
    "shm_bytes": 64 << 20,
    "iommu": {"active": False},
    "gpus": [{}, {}],
}


@pytest.mark.parametrize(
    ("facts", "devices", "words"),
    [
        ({}, 2, ["/dev/shm has 64 MB"]),
        ({"shm_bytes": 8 << 30}, 2, []),
        ({"peers": {"0-1": True, "1-0": True}, "iommu": {"active": True}}, 2, ["NCCL_P2P_DISABLE=1"]),
    ],
)
def test_hints(facts, devices, words):
    found = machine.hints(FACTS | facts, devices)
    assert len(found) == len(words)
    assert all(word in hint for word, hint in zip(words, found, strict=True))


def test_the_command_line(monkeypatch, tmp_path, capsys):
    for widget, value, said in (
        ("--devices", "cuda:9", "devices: 'cuda:9' is not a device of this machine"),
        ("--only", "modes,nothing", "--only: no check nothing"),
    ):
        with pytest.raises(SystemExit):
            arguments([widget, value])
        assert said in capsys.readouterr().err
    out = tmp_path / "result.json"
    assert main(["--devices", "cpu,cpu", "--only", "system,kernels", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "2 passed, 0 failed, 0 not looked at" in said.out
    assert "2 of 2: kernels" in said.err
    jsonschema.validate(json.loads(out.read_text()), SCHEMA)
    monkeypatch.setitem(checks.CHECKS, "kernels", ("", fails))
    assert main(["--devices", "cpu,cpu", "--only", "kernels"]) == 1


def test_a_run_that_is_cut_off_leaves_what_it_has_found(monkeypatch, tmp_path):
    def cut_off(*_) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "result.json"
    monkeypatch.setitem(checks.CHECKS, "kernels", ("", cut_off))
    with pytest.raises(KeyboardInterrupt):
        main(["--devices", "cpu,cpu", "--only", "system,kernels", "--out", str(out)])
    assert [check["name"] for check in json.loads(out.read_text())["checks"]] == ["system"]


GPUS = ("cuda:0", "cuda:1")


def compared(monkeypatch, tmp_path, rates: dict[Transport, float]) -> tuple[Findings, Transport]:
    """What is found between two GPUs with these GB/s, and how the next ComfyUI's ranks transfer. Ranks fail by a transport
    without a rate."""
    session, findings = SelfTestSession(Settings(GPUS), Host(folder=lambda: tmp_path)), Findings()

    def ranks():
        asked = session._registry.pools.transports.of(GPUS)
        return SimpleNamespace(self_test=SelfTest(transport=asked if asked in rates else WITHOUT_P2P))

    monkeypatch.setattr(session, "ranks", ranks)
    monkeypatch.setattr(transports, "backend_for", lambda _devices: "nccl")
    monkeypatch.setattr(transports, "rate", lambda pool, _session: rates[pool.self_test.transport])
    for name in transports.P2P_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with fake_cuda(ADA, ADA):
        transports.look_at_transports(session, findings)
        return findings, KeptTransports(lambda: tmp_path).of(GPUS)


@pytest.mark.parametrize(
    ("rates", "kept"),
    [
        ({BY_NCCL: 12.0, P2P_EVERYWHERE: 20.0, P2P_OVER_NVLINK: 12.0, WITHOUT_P2P: 9.0}, P2P_EVERYWHERE),
        ({BY_NCCL: 12.0, P2P_EVERYWHERE: 13.0, P2P_OVER_NVLINK: 12.5, WITHOUT_P2P: 9.0}, BY_NCCL),  # noise
        ({BY_NCCL: 12.0, P2P_OVER_NVLINK: 12.0, WITHOUT_P2P: 14.0}, WITHOUT_P2P),
        ({P2P_OVER_NVLINK: 12.0, WITHOUT_P2P: 9.0}, P2P_OVER_NVLINK),
    ],
)
def test_the_fastest_transport_is_used_from_now_on(monkeypatch, tmp_path, rates, kept):
    findings, used = compared(monkeypatch, tmp_path, rates)
    assert used == kept
    assert findings.figures["kept"] == kept.name
    assert findings.figures["GB_per_s"] == {one.name: rates.get(one, "failed") for one in transports.COMPARED}
    assert findings.figures["variables"] == [f"{name}={value}" for name, value in kept.variables]
