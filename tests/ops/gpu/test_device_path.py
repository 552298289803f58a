"""The way that steps take on a GPU, without one: padded steps and sampling in Triton's interpreter,
under an engine whose tokens must be those of the plain path."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import medusa_heads
import pytest
import tiny_encoders
import torch
from device_parts import (
    CPU,
    OPTIONS,
    PROMPTS,
    SHAPE,
    VOCAB_SIZE,
    WatchedSteps,
    generate,
    sampling,
    take_device_path,
)
from drafters import Oracle
from eagle_heads import Plain, Watched, make_head
from lora_slots import open_with_slots, random_adapter, runner_of, slots_of
from tiny_models import make_checkpoint
from without_kv import encode, forget

from penstock import LLM, SamplingParams
from penstock.ops import registry
from penstock.runner.drafter import Drafter
from penstock.runner.pooling import PoolingHead

pytest.importorskip("triton", reason="needs Triton")

from penstock.runner.device_steps import DeviceSteps
from penstock.runner.device_tables import DeviceTables
from penstock.runner.drafters.device_ngram import DeviceNgramDrafter
from penstock.runner.drafters.device_suffix import DeviceSuffixDrafter
from penstock.runner.graphs import MIXED_SIZES, mixed_sizes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled for the GPU there: see tests/gpu"
)

KINDS = {
    "greedy": [sampling(temperature=0.0)] * 2,
    "drawn": [sampling(temperature=0.0), sampling(temperature=0.9, seed=4, top_k=9)],
    "changed": [sampling(temperature=0.0), sampling(temperature=0.0, logit_bias={3: 9.0})],
}


def test_padded_steps_and_their_sampling_give_the_plain_paths_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = str(make_checkpoint(tmp_path, "qwen3", **SHAPE))
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = {name: generate(llm, params) for name, params in KINDS.items()}
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(checkpoint, **OPTIONS) as llm:
        graphs = take_device_path(llm)
        for name, params in KINDS.items():
            graphs.num_served = graphs.num_declined = 0
            assert generate(llm, params) == expected[name], name
            if name == "changed":
                assert graphs.num_declined > 0
            else:
                assert (graphs.num_served > 0, graphs.num_declined) == (True, 0), name


VERIFIED = {
    "greedy": [sampling(12, temperature=0.0)] * 2,
    "drawn": [sampling(12, temperature=0.0), sampling(12, temperature=0.9, seed=4, top_k=9)],
    "changed": [
        sampling(12, temperature=0.0, logprobs=2),
        sampling(12, temperature=0.8, seed=5, repetition_penalty=1.4),
    ],
}


def verified(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    kinds: dict[str, list[SamplingParams]],
    **settings: Any,
) -> None:
    """Tokens with drafts that mostly hold, on the way of a GPU, are those of the plain path."""
    checkpoint = str(make_checkpoint(tmp_path, variant, **{**SHAPE, **settings}))
    options = {**OPTIONS, "block_size": 4}
    with LLM(checkpoint, **options) as llm:
        expected = {name: generate(llm, params) for name, params in kinds.items()}
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    whole = [
        prompt["prompt_token_ids"] + tokens
        for found in expected.values()
        for prompt, tokens in zip(PROMPTS, found, strict=True)
    ]
    oracle = Oracle(whole, wrong=1, num_drafts=3)
    with LLM(checkpoint, drafter=oracle, **options) as llm:
        graphs = take_device_path(llm, oracle)
        steps = runner_of(llm).steps
        assert isinstance(steps, WatchedSteps)
        for name, params in kinds.items():
            oracle.num_accepted = graphs.num_served = graphs.num_declined = 0
            steps.buckets.clear()
            assert generate(llm, params) == expected[name], name
            assert oracle.num_accepted > 6, name
            # After the prompts, every step is padded to as many rows for each request.
            widths = {bucket.width for bucket in steps.buckets if bucket and bucket.decode}
            assert 4 in widths, name
            assert (graphs.num_declined > 0) == (name == "changed"), name


def test_drafts_verified_in_padded_steps_give_the_plain_paths_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {name: VERIFIED[name] for name in ("drawn", "changed")}  # one request is greedy
    verified(tmp_path, monkeypatch, "qwen3", kinds)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def test_heads_draft_on_the_way_of_a_gpu_as_plainly(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", **{**SHAPE, "num_hidden_layers": 2})
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    if kind == "eagle3":
        head, tensors = make_head(tmp_path / "head", target, num_tokens=40)
        plain, drafter = Plain(target, tensors), Watched(head)
    else:
        head = medusa_heads.make_heads(tmp_path / "heads", target)
        plain, drafter = medusa_heads.Plain(target, head), medusa_heads.Watched(str(head), 3)
    with LLM(str(target), drafter=drafter, **OPTIONS, block_size=4, dtype="float32") as llm:
        take_device_path(llm, drafter)
        generate(llm, [sampling(6, temperature=0.0)] * 2)
    assert len(drafter.proposals) > 8
    for known, drafts in drafter.proposals:
        assert drafts == plain.drafts(known, 3), known


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(DeviceNgramDrafter(3, 1, 3), marks=pytest.mark.slow),
        DeviceSuffixDrafter(3, 24, 10),
    ],
    ids=["ngram", "suffix"],
)
def test_drafts_of_the_device_give_the_plain_paths_tokens(
    drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = str(make_checkpoint(tmp_path, "qwen3", **SHAPE))
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = generate(llm, VERIFIED["drawn"])
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(checkpoint, drafter=drafter, **OPTIONS) as llm:
        take_device_path(llm, drafter)
        for _ in range(2):  # the second time after past outputs
            assert generate(llm, VERIFIED["drawn"]) == expected
        steps = runner_of(llm).steps
        assert isinstance(steps, WatchedSteps)
        assert any(bucket.width > 1 for bucket in steps.buckets if bucket)


HYBRID: dict[str, dict[str, Any]] = {  # more than one KV group, or another kind
    "deepseek_v3": {"num_hidden_layers": 1, "num_key_value_heads": 2},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 6},
    "gpt_oss": {"num_hidden_layers": 2, "sliding_window": 6, "num_local_experts": 2},
    "llama4": {
        "num_hidden_layers": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 6,
        "num_local_experts": 2,
    },
    "mamba2": {"num_hidden_layers": 1, "num_heads": 2, "head_dim": 32, "n_groups": 1},
    "qwen3_next": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "mlp_only_layers": [0, 1],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "variant", ["qwen3", "mamba2", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
def test_drafts_beside_prompts_give_the_plain_paths_tokens(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than slots: a prompt enters while others verify."""
    prompts = [{"prompt_token_ids": [1 + (index * 7) % 60] * 9} for index in range(6)]
    params = [sampling(4 + 2 * index, temperature=0.0) for index in range(6)]
    settings = {**SHAPE, **HYBRID.get(variant, {})}
    checkpoint = str(make_checkpoint(tmp_path, variant, **settings))
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    whole = [output.prompt_token_ids + list(output.outputs[0].token_ids) for output in expected]
    drafter = Oracle(whole, wrong=1, num_drafts=3)
    with LLM(checkpoint, drafter=drafter, **OPTIONS) as llm:
        take_device_path(llm, drafter)
        found = llm.generate(prompts, params, use_tqdm=False)
        steps = runner_of(llm).steps
        assert isinstance(steps, WatchedSteps)
        buckets = {
            bucket and bucket.decode for bucket in steps.buckets if not bucket or bucket.width > 1
        }
        # Mixed steps of recurrent layers are not padded.
        assert buckets == ({False, True} if variant == "qwen3" else {None, True})
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


OTHER_LAYERS = [
    "mamba2",
    "qwen3_next",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "gemma2", "gpt_oss")),
]


@pytest.mark.parametrize("variant", OTHER_LAYERS)
def test_drafts_of_other_kinds_of_layers_give_the_plain_paths_tokens(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified(tmp_path, monkeypatch, variant, {"greedy": VERIFIED["greedy"]}, **HYBRID[variant])


@pytest.mark.parametrize("variant", ["qwen3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_rows_with_adapters_give_the_plain_paths_tokens(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SHAPE, "num_local_experts": 2} if variant == "mixtral" else SHAPE
    checkpoint = make_checkpoint(tmp_path, variant, **settings)
    lora = {**OPTIONS, "max_loras": 3, "max_lora_rank": 8}

    def tokens(is_device: bool) -> list[list[int]]:
        with open_with_slots(checkpoint, **lora) as (llm, slots):
            for slot, rank in ((0, 3), (2, 8)):
                adapter = random_adapter(slots_of(runner_of(llm)), rank, seed=slot)
                if slot == 2:  # the other one adds to the head
                    adapter.replaced["lm_head"] = torch.randn(VOCAB_SIZE, SHAPE["hidden_size"])
                slots.place(slot, adapter)
            if is_device:
                take_device_path(llm)
            found = []
            for order in ((2, 0), (0, -1), (-1, -1)):
                slots.use(*order)
                found += generate(llm, KINDS["greedy"])
            return found

    torch.manual_seed(0)
    expected = tokens(is_device=False)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    torch.manual_seed(0)
    assert tokens(is_device=True) == expected
    replaced, added, base = expected[::2]
    assert added != base != replaced != added


@pytest.mark.parametrize("variant", [*OTHER_LAYERS, pytest.param("llama4", marks=pytest.mark.slow)])
def test_other_kinds_of_layers_give_the_plain_paths_tokens(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SHAPE, **HYBRID[variant]}
    checkpoint = str(make_checkpoint(tmp_path, variant, **settings))
    options = {**OPTIONS, "block_size": 4}
    with LLM(checkpoint, **options) as llm:
        expected = generate(llm, KINDS["greedy"])
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(checkpoint, **options) as llm:
        take_device_path(llm)
        assert generate(llm, KINDS["greedy"]) == expected


@pytest.mark.parametrize(("change", "num_tokens"), [(forget, 3), (encode, 1)])
def test_models_without_kv_groups_give_the_plain_paths_tokens(
    change: Callable[[pytest.MonkeyPatch], None],
    num_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    checkpoint = str(make_checkpoint(tmp_path, "llama", **SHAPE))
    params = [sampling(temperature=0.0, max_tokens=num_tokens)] * 2
    # An encoder's prompts are computed whole.
    options = {**OPTIONS, "max_num_batched_tokens": OPTIONS["max_model_len"]}
    with LLM(checkpoint, **options) as llm:
        expected = generate(llm, params)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(checkpoint, **options) as llm:
        take_device_path(llm)
        assert generate(llm, params) == expected


def test_only_models_without_a_cache_are_padded_to_large_sizes() -> None:
    assert mixed_sizes(8192, None) == [*MIXED_SIZES]
    assert mixed_sizes(300, None) == [16, 32, 64, 128, 256]
    assert max(mixed_sizes(8192, 768 * 768 * 3)) == 8192  # BERT-base
    assert max(mixed_sizes(8192, 1024 * 1024 * 3)) == 4608  # BERT-large
    assert max(mixed_sizes(8192, 4096 * 4096 * 3)) == 512  # the host is fast enough
    sizes = mixed_sizes(8192, 0.0)
    assert sizes == sorted(set(sizes))
    for smaller, size in itertools.pairwise(sizes[5:]):
        assert size <= 1.25 * smaller, "little padding"


def write_bert(folder: Path, monkeypatch: pytest.MonkeyPatch, head: str = "Model") -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    small["num_attention_heads"] = 2
    name, settings = tiny_encoders.ENCODERS["bert"]
    monkeypatch.setitem(tiny_encoders.ENCODERS, "bert", (name, settings | small))
    tiny_encoders.make_encoder(folder, "bert", head)


ENCODED = [{"prompt_token_ids": [8 + row] * length} for row, length in enumerate((1, 30, 9))]
ENCODER = {**OPTIONS, "max_num_batched_tokens": 64}


def pool_on_device_path(llm: LLM) -> None:
    """Put the parts that a GPU has for pooling into a CPU's runner."""
    runner = runner_of(llm)
    assert isinstance(runner.head, PoolingHead)
    tables = DeviceTables(4, 32, runner.tables.groups, CPU)
    runner.memory.second_segments = tables.mark_segments()
    steps = DeviceSteps(
        runner.model, VOCAB_SIZE, tables, runner.memory, max_num_batched_tokens=64, num_drafts=0,
        capture_graphs=False, dtype=torch.float32, has_logits=False, adapters=runner.adapters,
    )  # fmt: skip
    runner.tables, runner.steps = tables, steps
    runner.head = PoolingHead(runner.head.pooler, tables)


def test_encoders_in_padded_steps_give_the_plain_paths_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bert(tmp_path, monkeypatch)

    def vectors(llm: LLM) -> torch.Tensor:
        outputs = llm.embed(ENCODED, use_tqdm=False)
        assert all(output.error is None for output in outputs)
        return torch.tensor([output.outputs.embedding for output in outputs])

    with LLM(str(tmp_path), **ENCODER) as llm:
        expected = vectors(llm)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(str(tmp_path), **ENCODER) as llm:
        pool_on_device_path(llm)
        torch.testing.assert_close(vectors(llm), expected, atol=1e-4, rtol=0)


def test_labels_with_adapters_are_those_of_the_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bert(tmp_path, monkeypatch, "ForSequenceClassification")

    def labels(is_device: bool) -> torch.Tensor:
        with open_with_slots(tmp_path, **ENCODER, max_loras=3, max_lora_rank=8) as (llm, slots):
            for slot, rank in ((0, 3), (2, 8)):
                adapter = random_adapter(slots_of(runner_of(llm)), rank, seed=slot, scale=1.0)
                slots.place(slot, adapter)
            if is_device:
                pool_on_device_path(llm)
            found = []
            for order in ((2, 0, -1), (-1, -1, -1)):
                slots.use(*order)
                found += llm.classify(ENCODED, use_tqdm=False)
        assert all(output.error is None for output in found)
        return torch.tensor([output.outputs.probs for output in found])

    expected = labels(is_device=False)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    torch.testing.assert_close(labels(is_device=True), expected, atol=1e-4, rtol=0)
    changed, base = expected.chunk(2)
    assert ((changed - base).abs().amax(1) > 1e-3).tolist() == [True, True, False]
