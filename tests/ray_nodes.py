"""A Ray cluster whose nodes are all on this machine, with one CPU each: ranks must spread."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.server_process import children_of, name_of

from penstock.executor.nodes import free_port

# Ray waits for its agents and asks nodes how they are. A loaded machine is slow, a dead node is
# noticed after five questions.
SETTINGS = {"health_check_period_ms": 1000, "health_check_initial_delay_ms": 0}
PORTS = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port",
         "metrics_export_port")  # fmt: skip

# Ray gives a node 30 seconds to start, by this clock.
PATIENT = types.SimpleNamespace(
    time=time.time, sleep=time.sleep, monotonic=lambda: time.monotonic() / 20
)


class RayNodes:
    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.nodes: list[Any] = [cluster.head_node]

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--distributed-executor-backend", "ray", "--ray-address", self.address)

    def add(self) -> None:
        self.nodes.append(self._cluster.add_node(**node_options()))

    def remove(self, node: Any) -> None:
        """Kill a node's processes, with SIGKILL."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def ranks(self, node: Any) -> list[int]:
        """Processes of ranks on a node."""
        raylet = node.all_processes["raylet"][0].process.pid
        return [pid for pid in children_of(raylet) if "RankActor" in name_of(pid)]

    def nodes_with_ranks(self) -> list[Any]:
        return [node for node in self.nodes if self.ranks(node)]


def node_options() -> dict[str, Any]:
    own = {name: free_port("127.0.0.1") for name in PORTS}
    return {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False, **own}


@contextlib.contextmanager
def ray_nodes(num_nodes: int) -> Iterator[RayNodes]:
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # pytest's are too long for Ray's sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.setattr("ray._private.node.time", PATIENT)
        patch.setenv("RAY_TMPDIR", folder)  # a user's cluster is noted below /tmp
        patch.setenv("RAY_AUTH_MODE", "disabled")  # a user may have a token of another cluster
        (Path(folder) / "ray").mkdir()
        head = {**node_options(), "_system_config": SETTINGS}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = RayNodes(cluster)
            for _ in range(num_nodes - 1):
                nodes.add()
            yield nodes
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
