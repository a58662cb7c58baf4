"""What ranks hold, held against what the client says of it. Nothing is there of what has ended."""

from collections.abc import Mapping

from parallel_backend.client.memory_guard import EXACT
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.worker import Worker
from parallel_backend.wire import messages as m

GAPS = 4096
"""Bytes between the weights of a rank's groups, at most, which the file's header does not tell."""


def check(registry: Registry, runs: Mapping[int, set[int]]) -> None:
    """`runs`: by id() of a model, its open runs. Waits until all ranks have done what they were told."""
    for pool in registry.pools.working:
        models = [each.model for each in registry.models.of(pool)]
        read_memory(pool)
        for model in models:
            _check_client(model, runs.get(id(model), set()))
        for rank, worker in pool.ranks.workers.items():
            _check_rank(worker, rank, models, runs)
        for device in pool.devices:
            ranks = [rank for rank, name in enumerate(pool.devices) if name == device]
            held = sum(_bytes(engine) for rank in ranks for engine in pool.ranks.workers[rank].engines.values())
            counted = registry.models.held_on(pool, device)
            assert counted == held, f"{device}: the client counts {counted}"
    if any(True for _ in registry.models):  # what has failed is dropped at the next loading
        for entry in registry.models._models.values():
            assert entry.model.on_ranks, f"a model is kept that is not on ranks: {entry.setup.path.name}"


def read_memory(pool: Pool, number: int | None = None) -> list[m.DeviceMemoryReport]:
    return pool.ask(m.ReadMemory(), m.DeviceMemoryReport, number).result(timeout=60)


def _bytes(engine: Engine) -> int:
    return engine.stage.store.device_bytes + engine.stage.adapters.nbytes


def _check_client(model: RemoteTransformer, runs: set[int]) -> None:
    assert not model._posting.busy, "micro-steps are under way"
    assert model._memory._runs.keys() - {EXACT} == runs, f"runs that count: {[*model._memory._runs]}, open: {runs}"
    for rank, report in enumerate(read_memory(model.pool, model._ranks.number)):
        counted = model.weight_bytes[rank] + model.adapter_bytes[rank]
        assert report.held_bytes == counted, f"rank {rank} holds {report.held_bytes} bytes, the client counts {counted}"
    for rank, (expected, held) in enumerate(zip(model.resident.expected(), model.weight_bytes, strict=True)):
        # Ranks stream blocks near those that were streamed last, of another size where blocks differ.
        slack = GAPS + max(model.resident.weights[rank].blocks)
        assert abs(held - expected) <= slack and bool(held) == bool(expected), f"{expected} bytes expected, {held} held"
        assert held <= max(model.resident.limits[rank], model.resident.weights[rank].least) + GAPS, "more than the limit"


def _check_rank(worker: Worker, rank: int, models: list[RemoteTransformer], runs: Mapping[int, set[int]]) -> None:
    by_number = {model._ranks.number: model for model in models}
    assert worker.engines.keys() == by_number.keys(), f"rank {rank} has models {[*worker.engines]}, of {[*by_number]}"
    for number, engine in worker.engines.items():
        model, store = by_number[number], engine.stage.store
        kept = {each.id for each in model._posting._conditionings._held}
        there = engine.conditionings._held.keys()
        assert there == kept, f"rank {rank} has conditionings {[*there]}, of {kept}"
        opened = runs.get(id(model), set())
        assert engine.runs._runs.keys() == opened, f"rank {rank} has runs {[*engine.runs._runs]}, of {opened}"
        left = {key for key in engine.runs.buffers if key[0] not in opened or key[1] not in kept}
        assert not left, f"rank {rank} has keys and values of {left}"
        cache = engine.stage.module_cache
        cached = {cache._call[0]} if cache.outputs and cache._call is not None else set()
        assert cached <= kept, f"rank {rank} has modules' outputs of conditionings {cached - kept}"
        assert store.host_bytes == model.resident.host_bytes[rank]
        assert bool(engine.stage.adapters.nbytes) <= model._adaptation.present, f"rank {rank} has additions to weights"
    used = sum(engine.stage.store.device_bytes for engine in worker.engines.values())
    assert worker.copies.used == used, f"rank {rank}: {worker.copies.used} bytes are in use, weights are {used}"
