"""The Ray driver of RayRanks. It is a separate process, because Ray ends the driver when the cluster is lost, and ComfyUI
must survive that.

The driver starts an actor for each rank, which runs the rank, and reports to the client in JSON over an inherited pipe. When
the pipe closes, the driver and the actors end.
"""

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from parallel_backend.core.devices import device_kind
from parallel_backend.core.parent_process import ParentProcess
from parallel_backend.wire.rank_settings import RankSettings, StartSettings

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class RayJob:
    """The ranks to run on a cluster."""

    start: StartSettings
    entry: Callable[[RankSettings, Connection], None]
    """The main function of a rank's process, see local.rank_entry."""
    root: str
    """The folder that contains the node pack on every machine."""
    patience: float
    """Seconds within which the cluster must have enough free resources."""

    @property
    def devices(self) -> tuple[str, ...]:
        return self.start.devices

    def needs(self, rank: int) -> dict[str, float]:
        """Return the resources that a rank's actor needs, by Ray's names."""
        return {"GPU": 1} if device_kind(self.devices[rank]) == "cuda" else {"CPU": self.start.threads}


@dataclass(frozen=True)
class Node:
    """A machine of the cluster. `name` is Ray's id of the machine."""

    name: str
    address: str


class Refused(Exception):
    """The cluster cannot run the job. The text is shown to the user."""


def drive(connection: Connection, job: RayJob) -> None:
    """Main function of the process. Reports the ranks' machines, waits until the client listens, and starts the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for ComfyUI, whose end closes the pipe
    try:
        ray = connect()
    except Refused as error:
        tell(connection, refused=str(error))
        return
    actors: list[Any] = []
    try:
        group, nodes, bundles = place(ray, job)
        tell(connection, placed=[nodes[bundle].address for bundle in bundles], here=ray.util.get_node_ip_address())
        process = multiprocessing.parent_process()
        assert process is not None, "the client starts the driver"
        client = ParentProcess(process)  # a forked child of it may keep the pipe open
        while not connection.poll(LOOK_SECONDS):
            if client.has_ended():
                return
        ready = json.loads(connection.recv_bytes())
        runs = start(ray, job, group, bundles, ready, actors)
        # The client sends nothing more: something to read means that the pipe has closed.
        while not connection.poll(LOOK_SECONDS) and not client.has_ended():
            ended, _ = ray.wait(list(runs), num_returns=len(runs), timeout=0) if runs else ([], [])
            for run in ended:
                rank = runs.pop(run)
                tell(connection, ended=rank, how=how_ended(ray, run, nodes[bundles[rank]]))
    except Refused as error:
        tell(connection, refused=str(error))
    except (EOFError, OSError) as error:
        log.info("Parallel DiT: the client has gone (%r)", error)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()  # leaves the cluster, which frees the resources


def tell(connection: Connection, **what: Any) -> None:
    connection.send_bytes(json.dumps(what).encode())


def connect() -> Any:
    """Connect to the cluster of RAY_ADDRESS, or to the one that this machine belongs to. Returns the ray module."""
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise Refused(
            f"devices: RAY_ADDRESS is {address}, but ranks need this machine to be one of the cluster's. Start Ray here too "
            "(ray start --address=...), and set RAY_ADDRESS to the same address, or to nothing."
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(
            f"devices: no Ray cluster can be reached ({address}): {error} Start one (ray start --head on one machine, ray "
            "start --address=... on the others), or set RAY_ADDRESS to its address."
        ) from error
    return ray


def place(ray: Any, job: RayJob) -> tuple[Any, dict[int, Node], list[int]]:
    """Reserve resources on few machines, successive ranks on the same one. Returns the placement group, bundle -> machine,
    and rank -> bundle."""
    bundles = [job.needs(rank) for rank in range(len(job.devices))]
    wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("GPU", "CPU")}
    total = ray.cluster_resources()
    if any(total.get(name, 0) < count for name, count in wanted.items()):
        raise Refused(f"devices: {_short(job, wanted)}, and the Ray cluster has {_counted(total)} in all.")
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(job.patience):
        available = ray.available_resources()
        raise Refused(
            f"devices: {_short(job, wanted)}. The Ray cluster has {_counted(available)} free of {_counted(total)}, and "
            f"found no room within {job.patience:.0f} s. End other jobs there, or name fewer devices."
        )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
    order: list[int] = []
    free = sorted(range(len(bundles)), key=lambda bundle: (node_ids[bundle], bundle))
    for needs in bundles:
        bundle = next(bundle for bundle in free if bundles[bundle] == needs)
        free.remove(bundle)
        order.append(bundle)
    return group, {bundle: Node(name, addresses[name]) for bundle, name in node_ids.items()}, order


def _short(job: RayJob, wanted: dict[str, float]) -> str:
    cores = f" ({job.start.threads} for each CPU rank)" if wanted["CPU"] else ""
    return f"{len(job.devices)} ranks on {', '.join(job.devices)} need {_counted(wanted)}{cores}"


def _counted(resources: dict[str, float]) -> str:
    return f"{resources.get('GPU', 0):.0f} GPUs and {resources.get('CPU', 0):.0f} CPU cores"


def rank_actor() -> type:
    """Return the actor's class. Ray sends the code of a class defined in a function, so the class can add `root` to the path
    first."""

    class ParallelDiTRank:
        def __init__(self, root: str):
            import os
            import sys

            if not os.path.isdir(os.path.join(root, "parallel_backend")):
                raise FileNotFoundError(f"Parallel DiT is not at {root} on this machine")
            sys.path.insert(0, root)

        def run(self, entry, settings, address, key):
            from parallel_backend.wire.tcp import dial

            connection = dial(address, key, settings.rank)
            try:
                entry(settings, connection)
            finally:
                connection.close()

    return ParallelDiTRank


def start(ray: Any, job: RayJob, group: Any, bundles: list[int], ready: dict[str, Any], actors: list[Any]) -> dict[Any, int]:
    """Start the actors. Returns Ray's reference to each actor's run -> its rank. Each new actor is appended to `actors`."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind_of_actor = ray.remote(max_restarts=0)(rank_actor())
    runs = {}
    for rank, bundle in enumerate(bundles):
        needs = job.needs(rank)
        actor = kind_of_actor.options(
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote(job.root)
        actors.append(actor)
        settings = job.start.of_rank(rank, tuple(ready["rendezvous"]))
        run = actor.run.remote(job.entry, settings, tuple(ready["address"]), bytes.fromhex(ready["key"]))
        runs[run] = rank
    return runs


def how_ended(ray: Any, run: Any, node: Node) -> str:
    """Return how the rank ended, as a clause that follows its name."""
    try:
        ray.get(run)
    except ray.exceptions.RayTaskError as error:
        return f"could not run: {type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        alive = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
        lost = "was lost with its machine" if node.name not in alive else "was ended"
        return f"{lost}: {_cause(error)}"
    return "has ended"


def _cause(error: Exception) -> str:
    """Return the last line of Ray's message, without its list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1].partition(" Some common causes")[0].rstrip(".")
