"""Ranks as actors of a Ray cluster with three nodes: tokens, deaths, refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.streams import Answer, Streams
from ray_nodes import RayNodes, ray_nodes
from server_process import ServerProcess
from test_rank_recovery import FLAGS, KINDS, make_model
from test_rank_recovery import check_faults as check_streams
from tiny_engine import greedy_tokens, open_llm, random_prompts
from waiting import eventually

from penstock.protocol.errors import ConfigError

PROMPTS = random_prompts(3, 2, 9, 33)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes(3) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_too_few_nodes_are_refused(cluster: RayNodes, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 ranks .* need 1 CPU each, and the Ray cluster's 3"):
        open_llm(model, tensor_parallel_size=4, **options_of(cluster))
    assert not cluster.nodes_with_ranks()


LONG = [
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 1},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
]


@pytest.mark.parametrize(
    "sizes",
    [{"tensor_parallel_size": 2}, *(pytest.param(own, marks=pytest.mark.slow) for own in LONG)],
    ids=str,
)
def test_ranks_on_several_nodes_give_one_ranks_tokens(
    cluster: RayNodes, model: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    if "enable_expert_parallel" in sizes:
        model = make_model(tmp_path, "mixtral")
    with open_llm(model) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    with open_llm(model, **sizes, **options_of(cluster)) as llm:
        assert len(cluster.nodes_with_ranks()) == max(sizes.values())
        assert greedy_tokens(llm, PROMPTS) == expected


def kill_rank(cluster: RayNodes) -> None:
    (rank,) = cluster.ranks(cluster.nodes_with_ranks()[-1])
    os.kill(rank, signal.SIGKILL)


def kill_node(cluster: RayNodes) -> None:
    """Not the head: a cluster ends with it."""
    head = cluster.nodes[0]
    cluster.remove(next(node for node in cluster.nodes_with_ranks() if node is not head))


Fault = Callable[[RayNodes], None]


@pytest.mark.slow
def test_streams_survive_the_death_of_a_rank_and_of_a_node(cluster: RayNodes, model: Path) -> None:
    """The third node stands in for the dead one."""
    check_faults(cluster, model, ["-tp", "2"], [kill_rank, kill_node])


@pytest.mark.slow
def test_stages_survive_the_death_of_a_node_and_of_a_rank(cluster: RayNodes, model: Path) -> None:
    check_faults(cluster, model, ["-pp", "2"], [kill_node, kill_rank])


def check_faults(cluster: RayNodes, model: Path, ranks: list[str], faults: list[Fault]) -> None:
    """Streams during the faults are those of a calm run, whose tokens are those of one rank."""
    with ServerProcess(str(model), *FLAGS) as server:
        of_one_rank = [token_ids(answer) for answer in Streams(server).run(KINDS)]
    while len(cluster.nodes) < 3:
        cluster.add()
    with ServerProcess(str(model), *FLAGS, *ranks, *cluster.flags) as server:
        assert len(cluster.nodes_with_ranks()) == 2
        calm = Streams(server).run(KINDS)
        assert [token_ids(answer) for answer in calm] == of_one_rank
        check_streams(server, [partial(fault, cluster) for fault in faults])
        assert server.has_logged("(Ray node ")
        assert server.stop() == 0
    eventually(lambda: not cluster.nodes_with_ranks())


def token_ids(answer: Answer) -> list[list[int]]:
    assert answer.error is None
    assert answer.num_ends == 1
    return [answer.choices[index]["token_ids"] for index in sorted(answer.choices)]


def options_of(cluster: RayNodes) -> dict[str, Any]:
    return {"distributed_executor_backend": "ray", "ray_address": cluster.address}
