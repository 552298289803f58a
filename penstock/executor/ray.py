"""RayRanks: starts an engine's ranks on the nodes of a Ray cluster, one actor each.

Ray only places the ranks and starts their processes. Each connects to the engine over TCP and from
then on is served like a rank of another machine (`nodes.py`). Import this module only for
``distributed_executor_backend=ray``.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.config import EngineConfig
from penstock.executor.calls import Join
from penstock.executor.nodes import framed, free_port, read_join, use_tcp
from penstock.protocol.calls import encode
from penstock.protocol.errors import ConfigError, EngineDeadError
from penstock.protocol.version import VERSION

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame: its fourth byte is the type
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS
"""What a client says first. A gRPC server, as Ray's head is, answers with its settings."""
PLACEMENT_TIMEOUT_S = 120.0  # longer than Ray takes to notice a dead node
START_TIMEOUT_S = 300.0  # for the processes of all ranks


@dataclass(frozen=True)
class RankPlace:
    """Where an actor is."""

    node_id: str
    host: str
    address: str
    free_port: int
    gpus: tuple[str, ...]
    version: str

    @property
    def name(self) -> str:
        return f"{self.host} (Ray node {self.node_id[:8]})"


class RankActor:
    """A rank's process. Its rank is known once all actors have said where they are."""

    def place(self) -> RankPlace:
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return RankPlace(
            context.get_node_id(),
            socket.gethostname(),
            address,
            free_port(address),
            tuple(gpus),
            VERSION,
        )

    def connect(self, address: tuple[str, int], token: str, rank: int) -> None:
        """Open the socket on which calls will arrive."""
        self._end = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        self._end.settimeout(None)
        use_tcp(self._end)
        join = Join(VERSION, {}, rank, 0, socket.gethostname(), token)
        self._end.sendall(framed(encode(join)))

    def serve(self, visible_gpus: Sequence[str]) -> None:
        """Run calls until the engine closes the socket."""
        if visible_gpus:  # Ray shows one; peer memory needs those of the other ranks here, too
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus)
        from penstock.executor.rank import serve_socket  # imports torch, which reads this

        serve_socket(self._end.detach())


class RayRanks:
    """An engine's ranks in a cluster. Raises ConfigError if they cannot be placed.

    Ranks of a tensor-parallel group are on as few nodes as possible.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._actors: list[Any] = []  # by rank
        self._group: Any = None
        self._owns_session = not ray.is_initialized()
        if self._owns_session:
            _join_cluster(config.parallel.ray_address)
        try:
            self.config = _with_device(config, ray.cluster_resources())
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        num_ranks = self.config.parallel.num_ranks
        bundle = _bundle(self.config)
        _check_resources(bundle, num_ranks, ray.nodes())
        self._group = placement_group([bundle] * num_ranks, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            raise ConfigError(
                f"Ray has no room for {num_ranks} ranks with {_words(bundle)} each: free are "
                f"{_words(ray.available_resources())}. Stop what uses the rest, or add nodes"
            )
        actors = [self._actor(bundle, index) for index in range(num_ranks)]
        self._actors = actors
        places: list[RankPlace] = _get([actor.place.remote() for actor in actors])
        for place in places:
            if place.version != VERSION:
                raise ConfigError(
                    f"{place.name} has Penstock {place.version}, the engine {VERSION}: install "
                    "the same version on all nodes"
                )
        order = rank_order(places, ray.get_runtime_context().get_node_id())
        self._actors = [actors[index] for index in order]
        self._places = [places[index] for index in order]
        self.rendezvous = f"tcp://{self._places[0].address}:{self._places[0].free_port}"

    def _actor(self, bundle: Mapping[str, float], index: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        return ray.remote(RankActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,  # all ranks are restarted, with the engine
            scheduling_strategy=strategy,
        ).remote()  # fmt: skip

    def local_places(self) -> list[tuple[int, int]]:
        """By rank: its number among those on its node, and how many these are."""
        nodes = [place.node_id for place in self._places]
        return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]

    def connect(self) -> list[tuple[socket.socket, str]]:
        """The sockets of all ranks, in order, and their nodes. The ranks serve from now on."""
        address, token = ray.util.get_node_ip_address(), secrets.token_hex()
        with socket.create_server((address, 0), backlog=len(self._actors)) as server:
            target = server.getsockname()[:2]
            calls = [
                actor.connect.remote(target, token, rank) for rank, actor in enumerate(self._actors)
            ]
            _get(calls)
            ends = _accept(server, token, len(self._actors))
        by_node: dict[str, list[str]] = {}
        for place in self._places:
            by_node.setdefault(place.node_id, []).extend(place.gpus)
        for actor, place in zip(self._actors, self._places, strict=True):
            actor.serve.remote(sorted(by_node[place.node_id]))
        names = [place.name for place in self._places]
        return list(zip(ends, names, strict=True))

    def close(self) -> None:
        """End the actors and give their resources back."""
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._group = [], None
        if self._owns_session:
            ray.shutdown()


def rank_order(places: Sequence[RankPlace], own_node: str) -> list[int]:
    """Actors in the order of their ranks: by node, the engine's own first, then the fullest."""
    nodes = [place.node_id for place in places]

    def key(index: int) -> tuple[bool, int, str, tuple[str, ...], int]:
        node = nodes[index]
        return node != own_node, -nodes.count(node), node, places[index].gpus, index

    return sorted(range(len(places)), key=key)


def _join_cluster(address: str | None) -> None:
    if address is not None:
        _check_reachable(address)
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        ray.init(address=address or "auto", logging_level="error", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address is not None:  # something listens there
            raise ConfigError(
                f"the Ray cluster at {address} cannot be joined ({_first_line(error)}): run `ray "
                f"start --address={address}` on this machine, with the same version of Ray and the "
                "cluster's token (~/.ray/auth_token or RAY_AUTH_TOKEN)"
            ) from error
        raise ConfigError(
            "no Ray cluster was found on this machine: run `ray start --head` on one node and `ray "
            f"start --address=HEAD:6379` on the others, then set ray_address ({_first_line(error)})"
        ) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray sets its own


def _check_reachable(address: str) -> None:
    """Raise ConfigError at once. Ray would try for minutes, and log each try."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"ray_address must be HOST:PORT of the cluster's head node, such as 10.0.0.1:6379, got "
            f"{address!r}"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as end:
            end.sendall(HTTP2_PREFACE)
            if end.recv(len(HTTP2_SETTINGS), socket.MSG_WAITALL)[3:4] != HTTP2_SETTINGS[3:4]:
                raise ConnectionError("what listens there is not Ray's head node")
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster can be reached at {address} ({_first_line(error)}): check "
            "ray_address, and that `ray start --head` runs there"
        ) from error


def _with_device(config: EngineConfig, resources: Mapping[str, float]) -> EngineConfig:
    """The ranks' configuration: GPUs if the cluster has any, numbered by node."""
    kind = config.device.device
    if kind == "auto":
        kind = "cuda" if resources.get("GPU") else "cpu"
    device = replace(config.device, device=kind, device_ids=(), first_gpu=0, num_replicas=1)
    return replace(config, device=device)


def _bundle(config: EngineConfig) -> dict[str, float]:
    """What a rank asks Ray for."""
    if config.device.device == "cuda":
        return {"GPU": 1}
    return {"CPU": config.device.cpu_threads or 1}


def _check_resources(
    bundle: Mapping[str, float], num_ranks: int, nodes: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ConfigError if the ranks would not even fit into an idle cluster."""
    ((name, amount),) = bundle.items()
    have = [node["Resources"].get(name, 0) for node in nodes if node["Alive"]]
    if sum(int(each // amount) for each in have) < num_ranks:
        counts = ", ".join(f"{each:g}" for each in have)
        raise ConfigError(
            f"{num_ranks} ranks (tensor_parallel_size x pipeline_parallel_size) need {amount:g} "
            f"{name} each, and the Ray cluster's {len(have)} nodes have {counts}: add nodes, or "
            "use fewer ranks"
        )


def _accept(server: socket.socket, token: str, num_ranks: int) -> list[socket.socket]:
    """The ranks' sockets. They have connected already; strangers are turned away."""
    ends: dict[int, socket.socket] = {}
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while len(ends) < num_ranks:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            end, _ = server.accept()
            join = read_join(end)
            if join is None or not hmac.compare_digest(join.token, token):
                end.close()
                continue
            use_tcp(end)
            ends[join.node_rank] = end
    except BaseException:
        for end in ends.values():
            end.close()
        raise
    return [ends[rank] for rank in range(num_ranks)]


def _get(calls: Sequence[Any]) -> Any:
    """The results of actors' methods. Raises ConfigError or EngineDeadError if one fails."""
    try:
        return ray.get(list(calls), timeout=START_TIMEOUT_S)
    except GetTimeoutError as error:
        raise EngineDeadError(
            f"Ray did not start all ranks within {START_TIMEOUT_S:.0f} s: see `ray status`"
        ) from error
    except (RayError, OSError) as error:
        if "No module named 'penstock" in str(error):
            raise ConfigError(
                "a node of the Ray cluster has no Penstock: install the same version on all nodes"
            ) from error
        raise EngineDeadError(f"a rank could not be started: {_last_line(error)}") from error


def _words(resources: Mapping[str, float]) -> str:
    known = {name: value for name, value in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{value:g} {name}" for name, value in known.items()) or "none"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
