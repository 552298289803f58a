"""The Ray Serve application: its options, when it scales, and what clients see."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from ray_nodes import node_options
from server_process import children_of, engines_of
from test_rank_recovery import make_model
from tiny_engine import open_llm
from waiting import eventually

from penstock import SamplingParams
from penstock.config.ray_serve import RayServeConfig, read_serve_args
from penstock.engine.client import ReplicaStatus
from penstock.executor.nodes import free_port
from penstock.protocol.errors import ConfigError
from penstock.server import ray_serve

OPTIONS: dict[str, Any] = {
    "max_model_len": 256, "max_num_seqs": 2, "cpu_threads": 1, "kv_cache_memory_bytes": "16MiB",
    "served_model_name": "tiny", "target_queued_requests": 1,
}  # fmt: skip


def test_arguments_may_be_texts() -> None:
    typed = read_serve_args(OPTIONS | {"api_key": ["a"], "deployment_config": {"num_replicas": 2}})
    texts = {name.replace("_", "-"): str(value) for name, value in OPTIONS.items()}
    texts |= {"api_key": "a", "deployment_config": '{"num_replicas": 2}'}
    assert read_serve_args(texts) == typed
    assert typed[0].scheduler.max_num_seqs == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seq": 2}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"port": 8000}, "port is for penstock serve: on Ray Serve, proxies listen"),
        ({"nnodes": "2", "tensor_parallel_size": "2"}, "use distributed_executor_backend=ray"),
        ({"target_usage": 0}, "target_usage must be above 0"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be int, got 'many'"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ray_serve.application(args)


@pytest.mark.parametrize(
    ("options", "resources", "expected"),
    [
        ({"cpu_threads": 3, "tensor_parallel_size": 2}, {}, {"num_cpus": 6}),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, {"GPU": 8.0}, {"num_gpus": 4}),
        ({"device": "cpu"}, {"GPU": 8.0}, {"num_cpus": 1}),
        (
            {"distributed_executor_backend": "ray", "tensor_parallel_size": 8},
            {"GPU": 8.0},
            {"num_cpus": 1},  # the ranks ask for themselves
        ),
    ],
)
def test_a_replica_asks_for_the_devices_of_its_ranks(
    options: dict[str, Any], resources: dict[str, float], expected: dict[str, float]
) -> None:
    asked = ray_serve.deployment_options(*read_serve_args(options), resources)
    assert asked["ray_actor_options"] == expected


def test_the_users_options_of_a_deployment_count() -> None:
    own = {"ray_actor_options": {"num_cpus": 2}, "autoscaling_config": {"max_replicas": 4}}
    options = ray_serve.deployment_options(*read_serve_args({"deployment_config": own}), {})
    assert options["ray_actor_options"] == {"num_cpus": 2}
    assert options["autoscaling_config"]["max_replicas"] == 4
    policy = options["autoscaling_config"]["policy"]["policy_function"]
    assert policy == "penstock.server.ray_serve:choose_num_replicas"


def load_of(**status: Any) -> float:
    """Of a replica whose engine runs at most 10 requests."""
    replica = object.__new__(ray_serve.EngineReplica)
    replica._own = RayServeConfig(target_usage=0.5, target_queued_requests=4)
    state = ReplicaStatus(0, "serving", 0, **status)
    replica._client = SimpleNamespace(status=lambda: [state], max_num_seqs=10)  # type: ignore[assignment]
    return replica.load()


def test_the_load_is_usage_and_queue() -> None:
    assert load_of() == 0
    assert load_of(num_running=5, kv_cache_usage=0.25) == 1
    assert load_of(num_running=1, kv_cache_usage=0.75) == 1.5
    assert load_of(num_running=10, num_waiting=6) == 3.5


@pytest.mark.parametrize(
    ("loads", "current", "wanted"),
    [({}, 3, 7), ({"a": 0.2, "b": 0.3}, 2, 1), ({"a": 1.5, "b": 1.7}, 2, 4), ({"a": 1.5}, 2, 3)],
)
def test_there_are_as_many_replicas_as_their_loads_add_up_to(
    loads: dict[str, float], current: int, wanted: int
) -> None:
    """Those that have not reported yet are like the others."""
    context = SimpleNamespace(
        aggregated_metrics={ray_serve.LOAD: loads} if loads else {},
        current_num_replicas=current, target_num_replicas=7,
    )  # fmt: skip
    assert ray_serve.choose_num_replicas(context) == (wanted, {})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a Ray Serve that starts no application. Its metrics arrive often."""
    import ray
    from ray import serve

    folder, port = tempfile.mkdtemp(prefix="ray-"), free_port("127.0.0.1")
    (Path(folder) / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
        options = {**node_options(), "num_cpus": 4}
        ray.init("local", log_to_driver=False, logging_level="error", **known(options))
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Those that `ray.init` takes."""
    return {name: options[name] for name in ("num_cpus", "object_store_memory",
                                             "include_dashboard")}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


SCALING = {"min_replicas": 1, "max_replicas": 2, "look_back_period_s": 1, "upscale_delay_s": 0,
           "downscale_delay_s": 1}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"deployment_config": {"autoscaling_config": SCALING}},
        {"distributed_executor_backend": "ray", "tensor_parallel_size": 2,
         "deployment_config": {"ray_actor_options": {"num_cpus": 0}}},
    ],
    ids=["autoscaling", "ranks-as-actors"],
)  # fmt: skip
def test_streams_are_those_of_one_engine_while_replicas_come_and_go(
    port: int, model: Path, options: dict[str, Any]
) -> None:
    from ray import serve

    prompts = [f"{number}, " * 3 for number in range(8)]
    engine = {name: OPTIONS[name] for name in ("max_model_len", "max_num_seqs")}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with open_llm(model, skip_tokenizer_init=False, **engine) as llm:
        expected = [out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False)]
    serve.run(ray_serve.application({"model": str(model), **OPTIONS, **options}))
    scales = "autoscaling_config" in options["deployment_config"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=240)

    def stream(prompt: str) -> str:
        chunks = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=200, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts = [chunk.choices[0].text for chunk in chunks]
        assert len(texts) > 10
        return "".join(texts)

    def num_replicas() -> int:
        deployment = serve.status().applications["default"].deployments["Penstock"]
        return deployment.replica_states.get("RUNNING", 0)

    assert num_replicas() == 1
    assert engines(os.getpid())
    with ThreadPoolExecutor(len(prompts)) as pool:
        rounds = []
        while (scales and num_replicas() < 2) or not rounds:
            rounds.append(list(pool.map(stream, prompts)))
    assert all(answers == expected for answers in rounds)
    if scales:
        eventually(lambda: num_replicas() == 1)
    serve.delete("default")
    eventually(lambda: not engines(os.getpid()))


def engines(pid: int) -> set[int]:
    """Engine processes among the descendants of a process."""
    with contextlib.suppress(OSError):  # it may end meanwhile
        return engines_of(pid).union(*map(engines, children_of(pid)))
    return set()
