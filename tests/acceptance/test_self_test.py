"""The self-test's parts without ranks: statuses, JSON and schema, the page of text, and what is read of a machine."""

import contextlib
import dataclasses
import json
import socket
import sys
import tomllib
import types

import jsonschema
import pytest
import torch

from parallel_backend.acceptance import checks, endurance, kernels, machine, modes, own_model, report, tiny_model
from parallel_backend.acceptance.__main__ import arguments, main
from parallel_backend.acceptance.report import describe, verdict
from parallel_backend.acceptance.session import Findings, Host, NotLookedAt, OwnModel, SelfTestSession, Settings
from parallel_backend.core.attention_kernels import AttentionKernel
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.processes.failure_text import P2P_OFF
from parallel_backend.processes.pool import RankError
from parallel_backend.quickstart.model import WEIGHTS, mini_flux
from parallel_backend.wire.rank_settings import SelfTest
from testing import mini
from tests.support.fake_cuda import ADA, AMPERE, fake_cuda

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


def test_a_part_that_is_left_out_is_named(monkeypatch):
    result = look(monkeypatch, lambda session, findings: findings.leave_out("ulysses_degree 4", "2 heads"))
    assert (result.status, result.left_out) == (checks.PASSED, ("ulysses_degree 4: 2 heads",))
    assert "left out: ulysses_degree 4: 2 heads" in describe(report.document_of(CPUS, [result], 1.0))


@pytest.mark.parametrize("cancelled", [RuntimeError("as another host cancels"), KeyboardInterrupt()])
def test_cancel_ends_the_whole_and_counts_as_no_failure(monkeypatch, cancelled):
    def poll() -> None:
        raise cancelled

    monkeypatch.setattr(checks, "CHECKS", {"waits": ("", lambda session, findings: session.poll()), "never": ("", fails)})
    with pytest.raises(type(cancelled)) as raised:
        checks.run(CPUS, poll=poll)
    assert raised.value is cancelled


def test_progress_and_the_choice_of_checks(monkeypatch):
    seen = []
    results = checks.run(CPUS, progress=lambda *what: seen.append(what), only=("kernels", "system"))
    assert [result.name for result in results] == ["system", "kernels"]
    assert seen == [(0, 2, "system"), (1, 2, "kernels"), (2, 2, "")]
    assert [result.status for result in results] == [checks.PASSED] * 2
    valid(report.document_of(CPUS, results, 1.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("version"),
        lambda found: found.update(host="my-machine"),
        lambda found: found["checks"][0].update(status="perhaps"),
        lambda found: found["checks"][0].update(why="passed, but"),
        lambda found: found["checks"][0]["figures"].pop("iommu"),
        lambda found: found["checks"][0]["figures"]["gpus"].append({"name": "GPU"}),
    ],
)
def test_the_schema_refuses_other_forms(change):
    found = report.document_of(CPUS, checks.run(CPUS, only=("system",)), 1.0)
    valid(found)
    change(found)
    with pytest.raises(jsonschema.ValidationError):
        valid(found)


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


def test_figures_that_are_no_numbers_are_words_in_json(monkeypatch):
    found = report.document_of(CPUS, [look(monkeypatch, measures(float("inf"), 1.0))], 1.0)
    assert json.loads(report.dumps(found))["checks"][0]["figures"] == {"figure": "inf"}


@pytest.mark.parametrize(("world", "products"), [(2, set()), (3, set()), (4, {(2, 2)}), (8, {(2, 4)})])
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
    [("fp32", 0.0, "passed"), ("fp32", 1e-4, "failed"), ("bf16", 1e-2, "passed"), ("bf16", 0.2, "failed")],
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
    [({True: 1 + 1e-7}, "transfers beside computing give other bits"), ({True: 1.5, False: 1.5}, "a run is 0.5")],
)
@pytest.mark.parametrize("mode", ["pipefusion_degree 2", "patch_degree 2"])
def test_a_run_that_differs_with_its_transfers_or_from_one_rank_is_found(monkeypatch, modes_session, mode, other, why):
    whole, right = modes_session.load(Degrees(), "fp32").output, modes.sample_in_bands

    def sample(model, *given, overlap=None):
        return (whole * other[overlap], []) if overlap in other and str(model.degrees) == mode else right()

    monkeypatch.setattr(modes, "sample_in_bands", sample)
    load = modes_session.load

    def named(degrees, dtype):
        model = load(degrees, dtype)
        model.degrees = degrees
        return model

    monkeypatch.setattr(modes_session, "load", named)
    assert [why in text and mode in text for text in checks.look("modes", modes_session).why.splitlines()] == [True]


def test_one_rank_alone_leaves_modes_and_links_out(monkeypatch):
    monkeypatch.setattr(modes, "_one_rank", lambda *_: {})
    session = SelfTestSession(Settings(("cpu",)))
    modes_result, links_result = (checks.look(name, session) for name in ("modes", "links"))
    assert (modes_result.status, links_result.status) == (checks.PASSED, checks.NOT_LOOKED_AT)
    assert "there is one rank" in modes_result.left_out[0] and "there is one rank" in links_result.why


def test_decibels():
    exact = torch.tensor([0.0, 1.0, 2.0, 4.0])
    assert own_model.decibels(exact, exact) == 200
    assert own_model.decibels(exact + 0.4, exact) == pytest.approx(20)
    assert not own_model.decibels(exact * float("nan"), exact) >= 0


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


class Installed(AttentionKernel):
    """Said to be installed; its package cannot be imported."""

    def possible(self, *_where) -> bool:
        return True


def test_an_installed_kernel_that_fails_its_trial_is_named(monkeypatch):
    sdpa = kernels.KERNELS["sdpa"]
    monkeypatch.setattr(kernels, "KERNELS", {"sdpa": sdpa, "flash": Installed("flash", "flash-attn", "flash_attn")})
    result = checks.look("kernels", SelfTestSession(CPUS))
    assert result.status == checks.PASSED, result.why
    assert result.left_out[0].startswith("flash-attn: its trial on cpu failed: ModuleNotFoundError")


def test_wrong_attention_is_found(monkeypatch):
    attend = kernels.RankKernel.attend
    monkeypatch.setattr(kernels.RankKernel, "attend", lambda *given: attend(*given) * 1.05)
    result = checks.look("kernels", SelfTestSession(CPUS))
    assert result.status == checks.FAILED and "attention, float32 on cpu is 0.05, above its limit" in result.why


@pytest.mark.parametrize("p2p", [True, False])
def test_links_of_gpus_are_timed_with_p2p_and_without(monkeypatch, p2p):
    """Where ranks had to be started without P2P the check has failed, and says so; what is left is timed all the same."""
    session, asked = SelfTestSession(CPUS), []
    notes = () if p2p else (P2P_OFF,)
    pool = types.SimpleNamespace(devices=("cuda:0", "cuda:1"), notes=notes, self_test=SelfTest(p2p=p2p))
    speed = {"between": {"0-1": {"GB_per_s": 5.5, "us": 20.0}}, "crowding": 1.0}

    def special(self_test):
        asked.append(self_test.p2p)
        return contextlib.nullcontext(pool)

    monkeypatch.setattr(session, "ranks", lambda world: pool)
    monkeypatch.setattr(session, "special_ranks", special)
    monkeypatch.setattr(machine, "backend_for", lambda devices: "nccl")
    monkeypatch.setattr(machine, "links", lambda pool, session: speed)
    result = checks.look("links", session)
    assert result.status == (checks.PASSED if p2p else checks.FAILED)
    assert asked == ([False] if p2p else [])
    assert result.figures == {"links": speed, "P2P": p2p} | ({"links without P2P": speed} if p2p else {})
    assert result.why == "".join(notes)
    valid(report.document_of(CPUS, [result], 1.0))


GROWING = {
    "flat": ([100, 104, 99, 101] * 3, checks.PASSED),
    "grows at first": ([50, 70, 90, 100] + [100] * 8, checks.PASSED),
    "leaks": ([100 + 8 * cycle for cycle in range(12)], checks.FAILED),
}
"""What is in use on a rank's GPU after each cycle, in MB."""


@pytest.mark.parametrize("case", GROWING)
def test_memory_that_grows_from_loading_to_loading_is_found(monkeypatch, case):
    held, status = GROWING[case]
    session, sizes = SelfTestSession(Settings(("cuda:0", "cuda:1"), cycles=len(held))), iter(held)
    model = types.SimpleNamespace(predict=lambda *call: None)
    monkeypatch.setattr(session, "ranks", lambda world: None)
    monkeypatch.setattr(session, "load", lambda *which: model)
    monkeypatch.setattr(endurance, "held_bytes", lambda pool, session: [90_000_000, next(sizes) * 1_000_000])
    result = checks.look("lifetime", session)
    assert result.status == status, result.why
    assert "rank 0" not in result.why


STUCK = "Parallel DiT: rank 1 (cuda:1) came no further for 5 s, last seen in micro-step 4. Queue the prompt again."


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (STUCK, "passed"),
        (STUCK.replace("rank 1", "rank 0"), "failed"),
        (STUCK.replace("came no further for 5 s", "lost its peer"), "failed"),
        ("", "failed"),
    ],
)
def test_an_error_that_names_the_wrong_rank_or_thing_is_found(monkeypatch, error, status):
    session = SelfTestSession(Settings(("cuda:0", "cuda:1")))
    pool = types.SimpleNamespace(watchdog=types.SimpleNamespace())
    right = tiny_model.reference(session.tiny_model, *tiny_model.call())
    monkeypatch.setattr(session, "special_ranks", lambda start: contextlib.nullcontext(pool))
    monkeypatch.setattr(endurance, "load_model", lambda *_: None)
    monkeypatch.setattr(endurance, "error_of", lambda session, model: error)
    monkeypatch.setattr(session, "load", lambda *_: Computes(right, 0.0))
    assert checks.look("stuck GPU", session).status == status


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
    assert "cuda:1: NVIDIA GeForce RTX 4090, capability 8.9, 25.8 GB" in describe(found)


def test_one_gpu_is_shared_by_two_ranks():
    with fake_cuda(ADA):
        assert arguments([]).settings.devices == ("cuda:0", "cuda:0")
        assert arguments(["--devices", "cuda:0"]).settings.devices == ("cuda:0",)
    assert arguments([]).settings.devices == ("cpu", "cpu")
    with pytest.raises(ValueError, match="this machine alone"):
        Settings(("ray:cpu", "ray:cpu"))


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
        ({"transport": "gloo"}, 1, ["more GPUs than were looked at"]),
    ],
)
def test_hints(facts, devices, words):
    found = machine.hints(FACTS | facts, devices)
    assert len(found) == len(words)
    assert all(word in hint for word, hint in zip(words, found, strict=True))


@pytest.mark.parametrize(("line", "active"), [("quiet intel_iommu=on", True), ("quiet iommu=pt", False), ("quiet", True)])
def test_the_iommu_counts_as_on_unless_the_kernel_was_told_otherwise(monkeypatch, tmp_path, line, active):
    (tmp_path / "units" / "dmar0").mkdir(parents=True)
    (tmp_path / "cmdline").write_text(f"BOOT_IMAGE=/vmlinuz root=/dev/janes-disk {line}\n")
    monkeypatch.setattr(machine, "IOMMU", tmp_path / "units")
    monkeypatch.setattr(machine, "COMMAND_LINE", tmp_path / "cmdline")
    found = machine.iommu()
    assert (found["units"], found["active"]) == (1, active)
    assert all("iommu" in option for option in found["options"])


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024", "550.54.14"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (jane@tower)",
            "580.95.05 (open kernel module)",
        ),
    ],
)
def test_the_drivers_version(monkeypatch, tmp_path, line, version):
    (tmp_path / "version").write_text(f"{line}\nGCC version:\n")
    monkeypatch.setattr(machine, "NVIDIA_VERSION", tmp_path / "version")
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine._driver() == version


def test_the_command_line(monkeypatch, tmp_path, capsys):
    for widget, value, said in (
        ("--devices", "cuda:9", "devices: 'cuda:9' is no device of this machine"),
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


def test_the_packs_version_is_pyprojects_or_the_installed_packages(monkeypatch, tmp_path):
    assert report.pack_version() == tomllib.loads((report.ROOT / "pyproject.toml").read_text())["project"]["version"]
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", {"parallel-dit": "1.2.3"}.__getitem__)
    assert report.pack_version() == "1.2.3"
