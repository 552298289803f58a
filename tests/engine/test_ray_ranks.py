"""Ranks through Ray, without a cluster: their order, who may join, and what is refused."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import open_llm
from tiny_models import make_checkpoint

from penstock.config import EngineConfig
from penstock.executor import ray as ray_ranks
from penstock.executor.calls import Join
from penstock.executor.nodes import framed, free_port
from penstock.protocol.calls import encode
from penstock.protocol.errors import ConfigError
from penstock.protocol.version import VERSION


def place(node: str, *gpus: str) -> ray_ranks.RankPlace:
    return ray_ranks.RankPlace(node, f"host-{node}", "127.0.0.1", 1, gpus, VERSION)


def test_ranks_are_counted_node_by_node_beginning_with_the_engines_own() -> None:
    places = [place("b", "1"), place("c"), place("a"), place("b", "0"), place("c"), place("c")]
    order = ray_ranks.rank_order(places, "b")
    assert [places[index].node_id for index in order] == ["b", "b", "c", "c", "c", "a"]
    assert [places[index].gpus for index in order[:2]] == [("0",), ("1",)]


def config_of(**options: Any) -> EngineConfig:
    known: dict[str, Any] = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    return EngineConfig.from_options({**known, **options})


def test_ranks_run_on_gpus_if_the_cluster_has_any() -> None:
    on_cpu = ray_ranks._with_device(config_of(cpu_threads=3), {"CPU": 8.0})
    assert ray_ranks._bundle(on_cpu) == {"CPU": 3}
    on_gpu = ray_ranks._with_device(config_of(), {"CPU": 8.0, "GPU": 2.0})
    assert ray_ranks._bundle(on_gpu) == {"GPU": 1}
    asked = ray_ranks._with_device(config_of(device="cpu"), {"GPU": 2.0})
    assert ray_ranks._bundle(asked) == {"CPU": 1}


def test_a_cluster_that_is_too_small_is_named_node_by_node() -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": 8.0}}, {"Alive": True, "Resources": {}},
             {"Alive": False, "Resources": {"GPU": 8.0}}]  # fmt: skip
    ray_ranks._check_resources({"GPU": 1}, 8, nodes)
    with pytest.raises(ConfigError, match=r"16 ranks .* 1 GPU each, .* 2 nodes have 8, 0: add"):
        ray_ranks._check_resources({"GPU": 1}, 16, nodes)


def test_only_ranks_with_the_token_join() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = []
        for rank, token in ((0, "wrong"), (1, "right"), (0, "right")):
            ends.append(socket.create_connection(server.getsockname()))
            ends[-1].sendall(framed(encode(Join(VERSION, {}, rank, 0, "far", token))))
        ends.append(socket.create_connection(server.getsockname()))
        ends[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        accepted = ray_ranks._accept(server, "right", 2)
        assert [end.getpeername() for end in accepted] == [
            ends[2].getsockname(), ends[1].getsockname()
        ]  # fmt: skip
        for end in [*ends, *accepted]:
            end.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "nnodes > 1 is for distributed_executor_backend=mp"),
        ({"distributed_executor_backend": "mp", "ray_address": "a:1"}, "ray_address needs distri"),
        ({"distributed_executor_backend": "spark"}, "must be one of mp, ray"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**options)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("head", r"ray_address must be HOST:PORT .* got 'head'"),
        ("ray://head:10001", r"ray_address must be HOST:PORT .* got 'ray://head:10001'"),
        ("127.0.0.1:99999", "no Ray cluster can be reached at 127.0.0.1:99999"),
        ("127.0.0.1:{free}", r"can be reached at .*refused.*`ray start --head`"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, message: str) -> None:
    address = address.format(free=free_port("127.0.0.1"))
    with pytest.raises(ConfigError, match=message):
        ray_ranks.RayRanks(config_of(ray_address=address))


def test_a_port_of_something_else_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            end, _ = server.accept()
            with end:
                end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                end.recv(1 << 10)

        pool.submit(answer)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="what listens there is not Ray's head node"):
            ray_ranks.RayRanks(config_of(ray_address=address))


def test_a_cluster_that_does_not_let_us_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(ray_ranks, "_check_reachable", lambda address: None)
    monkeypatch.setattr(ray_ranks.ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"head:1 cannot be joined \(Failed .* cluster's token"):
        ray_ranks.RayRanks(config_of(ray_address="head:1"))
    with pytest.raises(ConfigError, match="no Ray cluster was found on this machine: run `ray st"):
        ray_ranks.RayRanks(config_of())


def test_a_missing_ray_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "penstock.executor.ray")
    with pytest.raises(ConfigError, match=r"backend=ray needs Ray: pip install 'penstock\[ray\]'"):
        open_llm(make_checkpoint(tmp_path, "llama"), distributed_executor_backend="ray")
