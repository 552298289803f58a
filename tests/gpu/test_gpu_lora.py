"""LoRA adapters on a GPU: the CPU's tokens, in graphs and without, alone and in one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run_without_waiting, sampling, tokens
from lora_slots import open_with_slots, random_adapter, runner_of, slots_of
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

from penstock import LLM, LoRARequest
from penstock.protocol.outputs import RequestOutput
from penstock.runner.device_batch import Bucket

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {**SETTINGS, "enable_lora": True, "max_lora_rank": 20}
GREEDY = sampling(max_tokens=24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def write_adapter(
    folder: Path, checkpoint: Path, seed: int, rank: int, targets: list[str], dora: bool = False
) -> LoRARequest:
    """A random adapter in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets:
            continue
        out_features, in_features = weight.shape
        a, b = (
            0.2 * torch.randn(shape, generator=generator)
            for shape in ((rank, in_features), (out_features, rank))
        )
        own = f"base_model.model.{module}"
        tensors |= {f"{own}.lora_A.weight": a, f"{own}.lora_B.weight": b}
        if dora:
            noise = 1 + 0.3 * torch.randn(out_features, generator=generator)
            tensors[f"{own}.lora_magnitude_vector"] = weight.norm(dim=1) * noise
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets,
        "use_dora": dora,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest(folder.name, seed + 1, str(folder))


@pytest.fixture(scope="module")
def requests(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [
        {"rank": 8, "targets": ALL},
        {"rank": 3, "targets": ["v_proj", "up_proj"]},  # parts of fused layers
        {"rank": 20, "targets": ALL, "dora": True},
        {"rank": 1, "targets": ["q_proj", "down_proj"]},
        {"rank": 16, "targets": ALL},
    ]
    return [
        write_adapter(root / f"a{seed}", checkpoint, seed, **kind)
        for seed, kind in enumerate(kinds)
    ]


def generate(llm: LLM, adapters: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(as_inputs(PROMPTS), params, lora_request=adapters, use_tqdm=False)


def open_lora(checkpoint: Path, **options: Any) -> LLM:
    return LLM(str(checkpoint), **{**LORA, "dtype": "float32", **options})


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, requests: list[LoRARequest]
) -> dict[LoRARequest | None, list[list[int]]]:
    """By adapter: the CPU's tokens of every prompt."""
    with open_lora(checkpoint, device="cpu") as llm:
        found = {adapter: tokens(generate(llm, adapter)) for adapter in (None, *requests)}
    assert len({str(own) for own in found.values()}) == len(found), "adapters change tokens"
    return found


Expected = dict[LoRARequest | None, list[list[int]]]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_scheduling": False},
                                     {"max_num_batched_tokens": 48}, {"max_num_seqs": 2},
                                     {"max_lora_rank": 64}])  # fmt: skip
def test_base_and_adapters_in_one_batch_give_the_cpus_tokens(
    checkpoint: Path, requests: list[LoRARequest], expected: Expected, options: dict[str, Any]
) -> None:
    adapters = [None, *requests]
    with open_lora(checkpoint, device="cuda", **options) as llm:
        for turn in range(len(adapters)):
            own = [*adapters[turn:], *adapters[:turn]]
            found = tokens(generate(llm, own))
            assert found == [expected[adapter][i] for i, adapter in enumerate(own)]


def test_slots_are_reused_while_two_steps_are_in_flight(
    checkpoint: Path, requests: list[LoRARequest], expected: Expected
) -> None:
    """Five adapters take turns in two slots, and outputs end at different times."""
    adapters = [*requests, None] * 4
    prompts = [index % len(PROMPTS) for index in range(len(adapters))]
    params = [sampling(max_tokens=4 + (7 * index) % 20) for index in range(len(adapters))]
    with open_lora(checkpoint, device="cuda", max_loras=2, max_num_seqs=5) as llm:
        inputs = as_inputs([PROMPTS[index] for index in prompts])
        for _ in range(2):
            outputs = llm.generate(inputs, params, lora_request=adapters, use_tqdm=False)
            for output, prompt, adapter, own in zip(
                tokens(outputs), prompts, adapters, params, strict=True
            ):
                assert output == expected[adapter][prompt][: own.max_tokens]


def logprobs_of(outputs: list[RequestOutput]) -> list[list[float]]:
    return [
        [at[token].logprob for at, token in zip(own.logprobs, own.token_ids, strict=True)]
        for own in (output.outputs[0] for output in outputs)
        if own.logprobs is not None
    ]


def captured_of(llm: LLM) -> set[Bucket]:
    return set(llm.engine.executor.worker.runner.steps._captured)  # type: ignore[attr-defined]


def test_graphs_with_adapters_change_no_bit(checkpoint: Path, requests: list[LoRARequest]) -> None:
    adapters = [None, *requests]
    params = sampling(logprobs=0)
    found = []
    for eager in (False, True):
        options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": eager}
        with open_lora(checkpoint, **options) as llm:
            for _ in range(2):
                outputs = generate(llm, adapters, params)
            found.append((tokens(outputs), logprobs_of(outputs)))
            if not eager:
                assert any(bucket.adapters and bucket.decode for bucket in captured_of(llm))
    assert found[0] == found[1]


def test_steps_without_adapters_are_those_of_an_engine_without_lora(
    checkpoint: Path, requests: list[LoRARequest]
) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    params = sampling(logprobs=0)
    with LLM(str(checkpoint), **SETTINGS, **options) as llm:
        for _ in range(2):
            plain = generate(llm, None, params)
        buckets = captured_of(llm)
    with open_lora(checkpoint, **options) as llm:
        generate(llm, requests[0], params)  # an adapter is in a slot
        before = captured_of(llm)
        for _ in range(2):
            found = generate(llm, None, params)
        assert captured_of(llm) - before == buckets
    assert tokens(found) == tokens(plain)
    assert logprobs_of(found) == logprobs_of(plain)


def test_no_step_with_adapters_waits_for_the_device(
    checkpoint: Path, requests: list[LoRARequest]
) -> None:
    with open_lora(checkpoint, device="cuda") as llm:
        adapters = [None, *requests]
        params = [GREEDY] * len(PROMPTS)
        for _ in range(2):
            expected = tokens(generate(llm, adapters, params))
        assert run_without_waiting(llm, params, adapters) == expected


@pytest.mark.parametrize(
    "variant", ["qwen3_tied", "llama", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma3"]
)
@pytest.mark.parametrize("eager", [False, True])
def test_an_adapter_of_every_layer_gives_the_cpus_tokens(
    variant: str, eager: bool, tmp_path: Path
) -> None:
    """Embedding, LM head and experts as well."""
    checkpoint = make_checkpoint(tmp_path, variant)
    found = []
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"device": device, "dtype": "float32", "cpu_backend": "torch"}
        options |= {"max_model_len": 256, "enforce_eager": eager, "kv_cache_memory_bytes": 2**26}
        with open_with_slots(checkpoint, **options) as (llm, slots):
            for slot, rank in ((0, 4), (2, 9)):
                slots.place(slot, random_adapter(slots_of(runner_of(llm)), rank, seed=slot))
            own = []
            for order in ((2, 0, -1), (-1,), (0,)):
                slots.use(*order)
                outputs = llm.generate(as_inputs(PROMPTS), GREEDY, use_tqdm=False)
                own.append(tokens(outputs))
            found.append(own)
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]
