"""The engine on a GPU against the reference path on a CPU, in float32: the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run, run_without_waiting, sampling, tokens
from tiny_models import make_checkpoint
from without_kv import encode, forget

from penstock.llm import LLM
from penstock.protocol.errors import ConfigError
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import SamplingParams
from penstock.runner.sampling_graphs import SamplingGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = sampling()
# One of each kind of sampling, and what no graph does, side by side.
MIXED = [
    sampling(),
    sampling(temperature=0.9, seed=5),
    sampling(temperature=0.7, seed=6, top_k=7),
    sampling(temperature=1.1, seed=7, top_p=0.8, repetition_penalty=1.3),
    sampling(logit_bias={5: 4.0}),
    sampling(temperature=0.9, seed=8, min_p=0.1, logprobs=3),
]
# What changes logits first, each in its own way.
CHANGED = [
    sampling(allowed_token_ids=[3, 5, 8, 13], logprobs=2),
    sampling(ignore_eos=False, min_tokens=25, stop_token_ids=list(range(0, 256, 2))),
    sampling(frequency_penalty=0.7, presence_penalty=0.3),
    sampling(temperature=0.8, seed=9, allowed_token_ids=list(range(50)), top_p=0.9),
    sampling(temperature=0.8, seed=10, logit_bias={7: 9.0, 9: -100.0}, logprobs=1),
    sampling(),
]


VARIANTS = ["qwen3", "llama", "mistral_windowed", "qwen3_moe", "qwen2_moe"]


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=2048)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_scheduling": False},
                                     {"max_num_batched_tokens": 48}, {"max_num_seqs": 2},
                                     {"block_size": 64}])  # fmt: skip
def test_greedy_tokens_are_the_cpus(checkpoint: Path, options: dict[str, Any]) -> None:
    expected = tokens(run(checkpoint, GREEDY, device="cpu"))
    assert tokens(run(checkpoint, GREEDY, device="cuda", **options)) == expected


@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"top_p": 0.8},
                                      {"min_p": 0.1, "repetition_penalty": 1.3}])  # fmt: skip
def test_seeded_draws_are_the_cpus(qwen3: Path, settings: dict[str, Any]) -> None:
    params = sampling(temperature=0.9, seed=5, **settings)
    expected = tokens(run(qwen3, params, device="cpu"))
    for eager in (False, True):
        assert tokens(run(qwen3, params, device="cuda", enforce_eager=eager)) == expected


def logprobs_of(outputs: list[RequestOutput]) -> list[list[tuple[int, float]]]:
    """The tokens listed at each place of each output, with what they are given."""
    found = []
    for output in outputs:
        for place in output.outputs[0].logprobs or []:
            found.append([(token, entry.logprob) for token, entry in place.items()])
    return found


@pytest.mark.parametrize("params", [MIXED, CHANGED])
def test_requests_of_every_kind_of_sampling_run_side_by_side(
    qwen3: Path, params: list[SamplingParams]
) -> None:
    expected = run(qwen3, params, device="cpu")
    for eager in (False, True):
        found = run(qwen3, params, device="cuda", enforce_eager=eager)
        assert tokens(found) == tokens(expected)
        pairs = zip(logprobs_of(found), logprobs_of(expected), strict=True)
        for ours, theirs in pairs:
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            assert [value for _, value in ours] == pytest.approx(
                [value for _, value in theirs], abs=1e-3
            )
    assert logprobs_of(expected)


def test_long_prompts_are_the_cpus_whole_and_in_chunks(qwen3: Path) -> None:
    """Steps beyond the largest bucket: prompts from their start, and chunks behind others."""
    prompts = [[1 + (index * step) % 250 for index in range(length)]
               for step, length in ((1, 700), (3, 5), (7, 1200), (11, 333), (5, 512))]  # fmt: skip
    options = {"max_model_len": 2048, "prompts": prompts}
    expected = tokens(run(qwen3, GREEDY, device="cpu", **options))
    for batched in (8192, 1000):
        found = run(qwen3, GREEDY, device="cuda", max_num_batched_tokens=batched, **options)
        assert tokens(found) == expected


def graphs_of(llm: LLM) -> SamplingGraphs:
    graphs = llm.engine.executor.worker.runner.head.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, SamplingGraphs)
    return graphs


def test_sampling_is_replayed_from_a_graph_of_its_own_for_each_kind(qwen3: Path) -> None:
    kinds = [
        sampling(),
        sampling(temperature=0.9, seed=5),
        sampling(temperature=0.9, seed=5, top_k=7),
        sampling(repetition_penalty=1.3),  # no graph does that
    ]
    with LLM(str(qwen3), **SETTINGS, dtype="float32", device="cuda") as llm:
        captured = graphs_of(llm)._captured
        found = []
        for params in kinds:
            llm.generate(as_inputs(PROMPTS), params, use_tqdm=False)
            found.append({(kind.draws, kind.truncates) for _, kind, _ in captured})
    assert found[0] == {(False, False)}
    assert found[1] == {(False, False), (True, False)}
    assert found[2] == found[3] == {(False, False), (True, False), (True, True)}


def test_no_step_of_a_steady_state_waits_for_the_device(checkpoint: Path) -> None:
    drawn = [sampling(temperature=0.8, seed=9, top_p=0.9), *[sampling()] * (len(PROMPTS) - 1)]
    with LLM(str(checkpoint), **SETTINGS, dtype="float32", device="cuda") as llm:
        for params in ([GREEDY] * len(PROMPTS), drawn):
            for _ in range(2):  # the second time a step's size comes up, its graph is captured
                expected = tokens(llm.generate(as_inputs(PROMPTS), params, use_tqdm=False))
            assert run_without_waiting(llm, params) == expected
        assert graphs_of(llm)._captured


def test_a_wait_behind_the_sampling_graph_would_be_noticed(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(qwen3), **SETTINGS, dtype="float32", device="cuda") as llm:
        params = [GREEDY] * len(PROMPTS)
        for _ in range(2):
            llm.generate(as_inputs(PROMPTS), params, use_tqdm=False)
        graphs = graphs_of(llm)
        run_graph = graphs._run

        def run_and_look(*args: Any) -> Any:
            chosen = run_graph(*args)
            chosen[0].tolist()
            return chosen

        monkeypatch.setattr(graphs, "_run", run_and_look)
        assert run_without_waiting(llm, params) is None


def test_a_peak_step_that_does_not_fit_names_the_remedy(qwen3: Path) -> None:
    options = {**SETTINGS, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.005}
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
        LLM(str(qwen3), **options, device="cuda")


def test_routed_experts_are_the_cpus(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    options = {"enable_return_routed_experts": True}
    cpu, gpu = (run(checkpoint, GREEDY, device=device, **options) for device in ("cpu", "cuda"))
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert (ours.outputs[0].routed_experts == theirs.outputs[0].routed_experts).all()


def test_models_without_kv_groups_give_the_cpus_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    # Without a given size of the cache, the largest step is measured.
    measured: dict[str, Any] = {"device": "cuda", "kv_cache_memory_bytes": None}
    with monkeypatch.context() as patched:
        forget(patched)
        expected = tokens(run(checkpoint, GREEDY, device="cpu"))
        assert tokens(run(checkpoint, GREEDY, **measured)) == expected
    encode(monkeypatch)
    expected = tokens(run(checkpoint, sampling(max_tokens=1), device="cpu"))
    found = run(checkpoint, sampling(max_tokens=1), enforce_eager=True, **measured)
    assert tokens(found) == expected
