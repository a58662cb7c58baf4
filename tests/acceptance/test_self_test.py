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

from parallel_backend.acceptance import document, faults, kit, lifetime, model_file, modes, system, topology, transport
from parallel_backend.acceptance.__main__ import arguments, main
from parallel_backend.acceptance.findings import Findings, NotLookedAt
from parallel_backend.acceptance.report import describe, verdict
from parallel_backend.acceptance.session import Host, OneRank, SelfTestSession, Settings
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.families.base.patching import latents_of
from parallel_backend.processes.failure_text import P2P_OFF
from parallel_backend.processes.pool import RankError
from parallel_backend.quickstart.model import WEIGHTS
from parallel_backend.wire.rank_settings import SelfTest
from testing.cases import OF_EACH_FORM, all_cases
from tests.support.fake_cuda import ADA, AMPERE, fake_cuda

CPUS = Settings(("cpu", "cpu"))
SCHEMA = json.loads(document.SCHEMA.read_text())


def valid(found: dict) -> None:
    """jsonschema.ValidationError if it is not of the form that the package promises."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(document.dumps(found)))


def look(monkeypatch, check, session: SelfTestSession | None = None) -> kit.Result:
    monkeypatch.setitem(kit.CHECKS, "made up", ("a check of the test's own", check))
    return kit.look("made up", session or SelfTestSession(CPUS))


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
        (measures(0.1, 0.2), kit.PASSED, ""),
        (measures(0.3, 0.2), kit.FAILED, "figure is 0.3, above its limit of 0.2"),
        (measures(float("nan"), 0.2), kit.FAILED, "figure is nan, above its limit of 0.2"),
        (cannot, kit.NOT_LOOKED_AT, "there is none"),
        (fails, kit.FAILED, "KeyError: 'what nobody thought of'"),
    ],
)
def test_what_comes_of_a_check(monkeypatch, check, status, why):
    """Each status with its reason, in the form of the schema."""
    result = look(monkeypatch, check)
    assert result.status == status
    assert why in result.why
    assert bool(result.why) == (status != kit.PASSED)
    found = document.document_of(CPUS, [result], 1.0)
    valid(found)
    assert found["summary"] == {name: int(name == status) for name in kit.STATUSES}
    said = {kit.PASSED: "passed: 1 of 1 checks", kit.FAILED: "FAILED: ", kit.NOT_LOOKED_AT: "passed: 0 of 1 checks, 1 not"}
    assert verdict(found).startswith(f"self-test {said[status]}")
    assert why in describe(found)


def test_a_part_that_is_left_out_is_named(monkeypatch):
    result = look(monkeypatch, lambda session, findings: findings.leave_out("ulysses_degree 4", "2 heads"))
    assert (result.status, result.left_out) == (kit.PASSED, ("ulysses_degree 4: 2 heads",))
    assert "left out: ulysses_degree 4: 2 heads" in describe(document.document_of(CPUS, [result], 1.0))


@pytest.mark.parametrize("cancelled", [RuntimeError("as another host cancels"), KeyboardInterrupt()])
def test_cancel_ends_the_whole_and_counts_as_no_failure(monkeypatch, cancelled):
    def poll() -> None:
        raise cancelled

    monkeypatch.setattr(kit, "CHECKS", {"waits": ("", lambda session, findings: session.poll()), "never": ("", fails)})
    with pytest.raises(type(cancelled)) as raised:
        kit.run(CPUS, poll=poll)
    assert raised.value is cancelled


def test_progress_and_the_choice_of_checks(monkeypatch):
    seen = []
    results = kit.run(CPUS, progress=lambda *what: seen.append(what), only=("kernels", "system"))
    assert [result.name for result in results] == ["system", "kernels"]
    assert seen == [(0, 2, "system"), (1, 2, "kernels"), (2, 2, "")]
    assert [result.status for result in results] == [kit.PASSED] * 2
    valid(document.document_of(CPUS, results, 1.0))


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
    found = document.document_of(CPUS, kit.run(CPUS, only=("system",)), 1.0)
    valid(found)
    change(found)
    with pytest.raises(jsonschema.ValidationError):
        valid(found)


def test_nothing_says_whose_machine_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(document.Path, "home", lambda: tmp_path / "home" / "jane.doe")
    monkeypatch.setattr(document, "_users", lambda: {"jane.doe"})
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-tower")
    text = (
        f"{tmp_path}/home/jane.doe/ComfyUI/x.py line 3; /mnt/janes disk/jane.doe/secret/models/flux.safetensors; "
        r"C:\Users\jane.doe\secret\ComfyUI\nodes.py; janes-tower said no; jane.doe did; a/b, 1/2 and /dev/shm stay"
    )
    found = document.impersonal(text)
    assert "alice" not in document.impersonal("see /home/alice/ComfyUI and C:\\Users\\alice\\ComfyUI, /srv/home/alice/x/y")
    assert not [word for word in ("jane.doe", "janes-tower", "secret") if word in found]
    assert "~/ComfyUI/x.py line 3" in found
    assert ".../models/flux.safetensors" in found
    assert ".../ComfyUI/nodes.py" in found
    assert found.endswith("a/b, 1/2 and /dev/shm stay")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/home/jane.doe/log")
    host = Host("ComfyUI 1.2.3", ("--base-directory", str(tmp_path / "home" / "jane.doe" / "ComfyUI")))
    results = kit.run(CPUS, host, only=("system",))
    text = document.dumps(document.document_of(CPUS, results, 1.0))
    assert "jane.doe" not in text
    assert '"NCCL_DEBUG_FILE": "~/log"' in text
    assert '"~/ComfyUI"' in text


def test_figures_that_are_no_numbers_are_words_in_json(monkeypatch):
    found = document.document_of(CPUS, [look(monkeypatch, measures(float("inf"), 1.0))], 1.0)
    assert json.loads(document.dumps(found))["checks"][0]["figures"] == {"figure": "inf"}


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


@pytest.mark.parametrize(
    ("dtype", "by", "status"),
    [("fp32", 0.0, "passed"), ("fp32", 1e-4, "failed"), ("bf16", 1e-2, "passed"), ("bf16", 0.2, "failed")],
)
def test_a_mode_that_differs_from_one_rank_is_found(monkeypatch, dtype, by, status):
    whole = torch.randn(2, 16, 15, 11, generator=torch.Generator().manual_seed(0))
    session = SelfTestSession(CPUS)
    session.one_rank = OneRank({"fp32": whole, "bf16": whole * 1.008}, whole, whole)
    load = lambda degrees, kind: Computes(  # noqa: E731
        session.one_rank.calls[kind], by if (kind, degrees.tensor) == (dtype, 2) else 0.0
    )
    monkeypatch.setattr(session, "load", load)
    monkeypatch.setattr(modes, "_look_at_run", lambda *_: None)
    result = kit.look("modes", session)
    assert result.status == status
    assert ("tensor_parallel_degree 2" in result.why) == (status == "failed")


def test_a_mode_that_fails_or_cannot_be_leaves_the_others_to_be_looked_at(monkeypatch):
    whole, session = torch.randn(2, 16, 15, 11), SelfTestSession(CPUS)
    session.one_rank = OneRank({"fp32": whole, "bf16": whole * 1.008}, whole, whole)

    def load(degrees, kind):
        if degrees.ring == 2:
            raise RankError("Parallel DiT: rank 1 (cuda:1) lost its peer")
        if degrees.ulysses == 2:
            raise ValueError("tensor_parallel_degree is 2, but this model has 1 attention heads")
        return Computes(session.one_rank.calls[kind], 0.0)

    monkeypatch.setattr(session, "load", load)
    monkeypatch.setattr(modes, "_look_at_run", lambda *_: None)
    result = kit.look("modes", session)
    assert result.status == kit.FAILED
    assert result.why == "ring_degree 2, fp32: Parallel DiT: rank 1 (cuda:1) lost its peer"
    assert [text.partition(":")[0] for text in result.left_out] == ["ulysses_degree 2, fp32"]
    assert len([name for name in result.figures if name.endswith((", fp32", ", bf16"))]) == len(AXES) - 2 + 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, ""),
        ({True: 1 + 1e-7}, "transfers beside computing give other bits"),
        ({True: 1.5, False: 1.5}, "a run is 0.5"),
    ],
)
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(patch=2, patch_mode="displaced")], ids=str)
def test_a_run_that_differs_with_its_transfers_or_from_one_rank_is_found(monkeypatch, degrees, other, why):
    whole, findings = torch.randn(2, 16, 15, 11), Findings()
    one = OneRank({}, whole, whole)
    monkeypatch.setattr(modes, "sample_in_bands", lambda *_, overlap: (whole * other.get(overlap, 1), []))
    modes._look_at_run(SelfTestSession(CPUS), findings, one, Computes(whole, 0.0), degrees)
    assert [why in text for text in findings.wrong] == [True] * bool(why)


def test_without_one_rank_to_compare_with_modes_are_not_looked_at():
    result = kit.look("modes", SelfTestSession(CPUS))
    assert (result.status, "whose own check has failed" in result.why) == (kit.NOT_LOOKED_AT, True)
    alone = kit.look("modes", SelfTestSession(Settings(("cpu",))))
    assert (alone.status, "there is one rank" in alone.why) == (kit.NOT_LOOKED_AT, True)


def test_decibels():
    exact = torch.tensor([0.0, 1.0, 2.0, 4.0])
    assert model_file.decibels(exact, exact) == 200
    assert model_file.decibels(exact + 0.4, exact) == pytest.approx(20)
    assert model_file.decibels(exact * float("nan"), exact) != model_file.decibels(exact, exact)
    assert not model_file.decibels(exact * float("nan"), exact) >= 0


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.family not in OF_EACH_FORM)) for case in all_cases()],
)
def test_every_family_has_a_problem_to_sample(case, tmp_path):
    """As many tokens as asked for, or as few as a square has; conditioning that the family itself takes for its own."""
    checkpoint = open_checkpoint(case.save(case.model(), tmp_path / "file.safetensors"))
    problem = model_file.problem_of(checkpoint, 64, 3)
    noise, *companion = latents_of(problem.noise)
    assert noise.shape[1] == checkpoint.family.sizes.latent_channels(checkpoint.config)
    assert len(companion) == (checkpoint.family.patching.companion is not None)
    assert 16 <= torch.Size(checkpoint.family.patching.grid(noise.shape)).numel() <= 64
    assert torch.equal(noise, latents_of(model_file.problem_of(checkpoint, 64, 3).noise)[0])
    assert problem.tensors


class Played:
    """Stands in for runs on ranks. `by`: mode -> how far off it is; other modes do not fit."""

    def __init__(self, monkeypatch, session: SelfTestSession, by: dict[str, float]):
        monkeypatch.setattr(session, "end_ranks", lambda: None)
        monkeypatch.setattr(model_file, "_on_ranks", self.on_ranks)
        self.by = by

    def on_ranks(self, session, checkpoint, degrees, dtype, problem):
        if str(degrees) not in self.by:
            raise ValueError("this does not fit")
        sample = problem.noise * (1 + self.by[str(degrees)])
        figures = {"seconds_per_step": 0.5, "peak_bytes": [10**9] * degrees.world, "load_seconds": 1.0}
        return sample, degrees.pipe == 1, figures


@pytest.fixture
def users_file(tmp_path):
    """A file of a family."""
    case = next(case for case in all_cases() if case.name == "wan-2.2-animate")
    return case.save(case.model(), tmp_path / "model.safetensors")


def test_a_users_model_is_compared_with_the_first_run_that_works(monkeypatch, users_file):
    session = SelfTestSession(dataclasses.replace(CPUS, model=users_file))
    Played(monkeypatch, session, {"ulysses_degree 2": 0.0, "ring_degree 2": 0.5, "pipefusion_degree 2": 0.03})
    result = kit.look("model file", session)
    first, ring, piped = result.figures["runs"]
    assert (first["mode"], "dB" in first) == ("ulysses_degree 2", False)
    assert (ring["mode"], piped["mode"]) == ("ring_degree 2", "pipefusion_degree 2")
    assert ring["dB"] < 35 < piped["dB"]
    assert result.status == kit.FAILED
    assert "ring_degree 2 is" in result.why
    assert "pipefusion" not in result.why
    assert [text.partition(":")[0] for text in result.left_out] == [
        "the same model without ranks",
        "one rank",
        "tensor_parallel_degree 2",
    ]
    found = document.document_of(session.settings, [dataclasses.replace(result, status=kit.PASSED, why="")], 1.0)
    valid(found)
    assert "pipefusion_degree 2: 0.5 s a step" in describe(found)
    assert str(users_file.parent) not in document.dumps(found)


def test_a_file_that_comfyuis_class_computes_needs_the_node():
    result = kit.look("model file", SelfTestSession(dataclasses.replace(CPUS, model=WEIGHTS)))
    assert (result.status, "node Parallel Self-Test" in result.why) == (kit.NOT_LOOKED_AT, True)


def test_the_hosts_own_model_is_run_where_it_has_one(monkeypatch, users_file):
    calls = []

    @contextlib.contextmanager
    def native(checkpoint, tensors):
        def predict(x, timestep, given):
            calls.append(float(timestep[0]))
            return torch.zeros_like(x)

        yield predict

    session = SelfTestSession(dataclasses.replace(CPUS, model=users_file, steps=3), Host("ComfyUI 9", native=native))
    Played(monkeypatch, session, {"one rank": 0.0})
    result = kit.look("model file", session)
    assert [run["mode"] for run in result.figures["runs"]] == ["ComfyUI 9, no ranks", "one rank"]
    assert len(calls) == 2 + 3  # a rehearsal first
    assert result.figures["runs"][1]["dB"] == 200
    assert result.status == kit.PASSED


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
    monkeypatch.setattr(transport, "backend_for", lambda devices: "nccl")
    monkeypatch.setattr(transport, "links", lambda pool, session: speed)
    result = kit.look("links", session)
    assert result.status == (kit.PASSED if p2p else kit.FAILED)
    assert asked == ([False] if p2p else [])
    assert result.figures == {"links": speed, "P2P": p2p} | ({"links without P2P": speed} if p2p else {})
    assert result.why == "".join(notes)
    valid(document.document_of(CPUS, [result], 1.0))


@pytest.mark.parametrize(("world", "turns"), [(1, 2), (2, 2), (16, 1)])
def test_models_are_loaded_in_the_modes_that_they_have(world, turns):
    assert len(lifetime.turns_of(SelfTestSession(Settings(("cpu",) * world)))) == turns


GROWING = {
    "flat": ([100, 104, 99, 101] * 3, [9] * 12, kit.PASSED),
    "grows at first": ([50, 70, 90, 100] + [100] * 8, [5] * 2 + [9] * 10, kit.PASSED),
    "leaks": ([100 + 8 * cycle for cycle in range(12)], [9] * 12, kit.FAILED),
    "leaks threads": ([100] * 12, list(range(12)), kit.FAILED),
}
"""What a rank holds after each cycle, in MB, and its threads."""


@pytest.mark.parametrize("case", GROWING)
def test_memory_that_grows_from_loading_to_loading_is_found(monkeypatch, case):
    held, threads, status = GROWING[case]
    session = SelfTestSession(dataclasses.replace(CPUS, cycles=len(held)))
    pool = types.SimpleNamespace(pids=(1, 2))
    model = types.SimpleNamespace(
        checkpoint=types.SimpleNamespace(config=None),
        family=types.SimpleNamespace(inputs=types.SimpleNamespace(example=lambda config, words: {})),
        predict=lambda *call: None,
    )
    sizes, counts = iter(held), iter(threads)
    monkeypatch.setattr(session, "ranks", lambda world: pool)
    monkeypatch.setattr(session, "load", lambda *which: model)
    monkeypatch.setattr(lifetime, "held_bytes", lambda pool, session: [90_000_000, next(sizes) * 1_000_000])
    monkeypatch.setattr(lifetime, "thread_count", lambda pid: 9 if pid == 1 else next(counts))
    result = kit.look("lifetime", session)
    assert result.status == status, result.why
    assert "rank 0" not in result.why


STUCK = "Parallel DiT: rank 1 (cuda:1) came no further for 5 s, last seen in micro-step 4. Queue the prompt again."


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (STUCK, "passed"),
        (STUCK.replace("rank 1", "rank 0"), "failed"),
        (STUCK.replace("came no further for 5 s", "lost its peer"), "failed"),
        (None, "failed"),
    ],
)
def test_an_error_that_names_the_wrong_rank_or_thing_is_found(monkeypatch, error, status):
    session = SelfTestSession(Settings(("cuda:0", "cuda:1")))
    pool = types.SimpleNamespace(watchdog=types.SimpleNamespace())
    monkeypatch.setattr(session, "special_ranks", lambda start: contextlib.nullcontext(pool))
    monkeypatch.setattr(faults, "load_model", lambda *_: None)
    monkeypatch.setattr(faults, "_error_of", lambda session, model: error)
    monkeypatch.setattr(faults, "_works_again", lambda session, findings: None)
    assert kit.look("stuck GPU", session).status == status


def test_two_gpus_as_the_check_of_the_machine_sees_them(monkeypatch):
    with fake_cuda(AMPERE, ADA) as cuda:
        cuda.hold_elsewhere(1 << 30, 1)
        settings = arguments([]).settings
        assert settings.devices == ("cuda:0", "cuda:1")
        result = kit.look("system", SelfTestSession(settings))
    assert result.status == kit.PASSED, result.why
    first, second = result.figures["gpus"]
    assert (first["name"], first["capability"]) == ("NVIDIA GeForce RTX 3090", [8, 6])
    assert second["memory_bytes"] - second["free_bytes"] == 1 << 30
    assert result.figures["peers"] == {"0-1": True, "1-0": True}
    assert any("nvidia-ml-py" in text for text in result.left_out)
    found = document.document_of(settings, [result], 1.0)
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
    found = system.hints(FACTS | facts, devices)
    assert len(found) == len(words)
    assert all(word in hint for word, hint in zip(words, found, strict=True))


@pytest.mark.parametrize(("line", "active"), [("quiet intel_iommu=on", True), ("quiet iommu=pt", False), ("quiet", True)])
def test_the_iommu_counts_as_on_unless_the_kernel_was_told_otherwise(monkeypatch, tmp_path, line, active):
    (tmp_path / "units" / "dmar0").mkdir(parents=True)
    (tmp_path / "cmdline").write_text(f"BOOT_IMAGE=/vmlinuz root=/dev/janes-disk {line}\n")
    monkeypatch.setattr(system, "IOMMU", tmp_path / "units")
    monkeypatch.setattr(system, "COMMAND_LINE", tmp_path / "cmdline")
    found = system.iommu()
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
    monkeypatch.setattr(system, "NVIDIA_VERSION", tmp_path / "version")
    monkeypatch.setattr(sys, "platform", "linux")
    assert system._driver() == version


class Nvml(types.ModuleType):
    """Four devices: 0 and 1 joined by two NVLinks, 2 behind the other socket, 3 with four links into a switch."""

    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 2
    LINKS = ([1, 1], [0, 0], [], ["switch"] * 4)

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        assert uuid.startswith("GPU-00000000-")
        return int(uuid[-1])

    def nvmlDeviceGetPciInfo(self, device: int):
        return types.SimpleNamespace(busId=device)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, two: int) -> int:
        return 50 if 2 in (one, two) else 30

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        if link >= len(self.LINKS[device]):
            raise self.NVMLError("Not Supported")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: int, link: int) -> int:
        return 2 if self.LINKS[device][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int):
        return types.SimpleNamespace(busId=self.LINKS[device][link])


def test_the_topology_in_nvidia_smis_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    with fake_cuda(ADA, ADA, ADA, ADA):
        found = topology.topology(4)
    assert found == [
        ["X", "NV2", "SYS", "PHB"],
        ["NV2", "X", "SYS", "PHB"],
        ["SYS", "SYS", "X", "SYS"],
        ["NV4", "NV4", "NV4", "X"],
    ]


def test_without_nvml_the_topology_is_not_looked_at(monkeypatch):
    with pytest.raises(NotLookedAt, match="no NVIDIA GPU"):
        topology.topology(0)
    nvml = Nvml("pynvml")
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(nvml.NVMLError("Driver Not Loaded")), raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with fake_cuda(ADA), pytest.raises(NotLookedAt, match="NVML says Driver Not Loaded"):
        topology.topology(1)


def test_the_command_line(monkeypatch, tmp_path, capsys):
    missing = str(tmp_path / "none")
    for widget, value, said in (
        ("--devices", "cuda:9", "devices: 'cuda:9' is no device of this machine"),
        ("--only", "modes,nothing", "--only: no check nothing"),
        ("--model", missing, f"--model: there is no {missing}"),
    ):
        with pytest.raises(SystemExit):
            arguments([widget, value])
        assert said in capsys.readouterr().err
    given = arguments(["--devices", "cpu,cpu", "--model", str(WEIGHTS), "--tokens", "64", "--steps", "3", "--cycles", "5"])
    assert given.settings == Settings(("cpu", "cpu"), WEIGHTS, None, 64, 3, 5)
    out = tmp_path / "result.json"
    assert main(["--devices", "cpu,cpu", "--only", "system,kernels", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "2 passed, 0 failed, 0 not looked at" in said.out
    assert "2 of 2: kernels" in said.err
    jsonschema.validate(json.loads(out.read_text()), SCHEMA)
    monkeypatch.setitem(kit.CHECKS, "kernels", ("", fails))
    assert main(["--devices", "cpu,cpu", "--only", "kernels"]) == 1


def test_a_run_that_is_cut_off_leaves_what_it_has_found(monkeypatch, tmp_path):
    def cut_off(*_) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "result.json"
    monkeypatch.setitem(kit.CHECKS, "kernels", ("", cut_off))
    with pytest.raises(KeyboardInterrupt):
        main(["--devices", "cpu,cpu", "--only", "system,kernels", "--out", str(out)])
    assert [check["name"] for check in json.loads(out.read_text())["checks"]] == ["system"]


def test_a_first_stage_that_lingers_over_its_send_takes_nothing_from_the_hop(monkeypatch):
    """Its micro-step may end after the call: the hop of a busy machine would be below zero."""
    stages = [types.SimpleNamespace(compute_seconds=compute, wait_seconds=0.0) for compute in (5.0, 0.0)]
    model = types.SimpleNamespace(predict=lambda *_: None, close_run=lambda *_: stages)
    monkeypatch.setattr(SelfTestSession, "load", lambda *_: model)
    findings = Findings()
    transport.look_at_hop(SelfTestSession(CPUS), findings)
    assert findings.figures["ms of a hop, median"] >= 0


def test_the_packs_version_is_pyprojects_or_the_installed_packages(monkeypatch, tmp_path):
    assert document.pack_version() == tomllib.loads((document.ROOT / "pyproject.toml").read_text())["project"]["version"]
    monkeypatch.setattr(document, "ROOT", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", {"parallel-dit": "1.2.3"}.__getitem__)
    assert document.pack_version() == "1.2.3"
