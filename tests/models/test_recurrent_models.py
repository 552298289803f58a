"""Models with recurrent layers: what chunks, cached states, preemption, backends and ranks must
not change. Their parity with transformers, alone and batched, is in test_parity."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Oracle, Stubborn
from eagle_heads import make_head
from tiny_engine import (
    assert_ranks_agree,
    greedy_tokens,
    open_llm,
    random_prompts,
    tokens_and_logprobs,
)
from tiny_models import config_of, make_checkpoint

from penstock import LLM, SamplingParams
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.build import Build
from penstock.layers.linear import Part
from penstock.layers.recurrent import CausalConv
from penstock.models.config import DecoderConfig
from penstock.models.qwen3_next import FULL, LINEAR, mixer_of_layer
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import RecurrentSpec
from penstock.protocol.step import StepPlan
from penstock.runner.drafter import Drafter
from penstock.runner.runner import StepHandle

# Of each, how many blocks are so few that requests must give way.
VARIANTS = {"mamba2": 5, "falcon_h1": 12, "falcon_h1_normed": 12, "qwen3_next": 18}
PROMPTS = random_prompts(4, 3, 17, 40, 90)


def checkpoint_size(llm: LLM) -> int:
    """Tokens between two states that are kept."""
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    assert executor.worker.runner is not None
    groups = executor.worker.runner.memory.layout.groups
    (size,) = {group.block_size for group in groups if isinstance(group.spec, RecurrentSpec)}
    return size


@pytest.mark.parametrize(
    "variant",
    ["mamba2", "falcon_h1", pytest.param("falcon_h1_normed", marks=pytest.mark.slow), "qwen3_next"],
)
def test_the_engine_around_them_changes_nothing(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = greedy_tokens(llm, PROMPTS)
    with open_llm(checkpoint, cpu_backend="torch") as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
    with open_llm(checkpoint, max_num_batched_tokens=7) as llm:  # prompts in chunks
        assert greedy_tokens(llm, PROMPTS) == alone
        assert greedy_tokens(llm, PROMPTS) == alone  # from the prefix cache
        hits = llm.engine.stats().num_prefix_hits
        assert hits > 0
        assert hits % checkpoint_size(llm) == 0
    tight = {"num_gpu_blocks_override": VARIANTS[variant], "async_scheduling": True}
    with open_llm(checkpoint, max_model_len=128, max_num_batched_tokens=32, **tight) as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.stats().num_preemptions > 0


def test_a_longer_prompt_goes_on_from_a_state_in_the_middle_of_another(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_next")
    prompt = PROMPTS[3]["prompt_token_ids"]
    fork = {"prompt_token_ids": [*prompt[:70], 5, 6, 7]}
    with open_llm(checkpoint, enable_prefix_caching=False) as llm:
        expected = greedy_tokens(llm, [fork])
    with open_llm(checkpoint) as llm:
        greedy_tokens(llm, PROMPTS[3:])
        before = llm.engine.stats().num_prefix_hits
        ours = greedy_tokens(llm, [fork])
        size = checkpoint_size(llm)
        assert llm.engine.stats().num_prefix_hits - before == 70 // size * size
    assert ours == expected


def test_states_that_nobody_holds_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, "falcon_h1")
    options = {"enable_prefix_caching": False, "num_gpu_blocks_override": 64, "max_model_len": 256}
    with open_llm(checkpoint, **options) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    with open_llm(checkpoint, **options) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, InProcessExecutor)
        runner, pool = executor.worker.runner, llm.engine.scheduler.kv.pool
        assert runner is not None
        launch, memory = runner.launch, runner.memory

        def poison_and_launch(plan: StepPlan) -> StepHandle:
            free = torch.tensor([block.ref_count == 0 for block in pool.blocks])
            for state in itertools.chain(memory.caches.values(), *memory.states.values()):
                state[free] = float("nan")
            return launch(plan)

        monkeypatch.setattr(runner, "launch", poison_and_launch)
        assert greedy_tokens(llm, PROMPTS) == expected


DRAFTED = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("variant", ["mamba2", "falcon_h1", "qwen3_next"])
def test_drafts_change_nothing(variant: str, tmp_path: Path) -> None:
    """Some hold and some do not, inside of blocks and across their ends, which are published."""
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = tokens_and_logprobs(llm, PROMPTS, DRAFTED)
    whole = [
        prompt["prompt_token_ids"] + tokens
        for prompt, (tokens, _) in zip(PROMPTS, alone, strict=True)
    ]
    continued = [{"prompt_token_ids": tokens[:-1]} for tokens in whole]
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1) as llm:
        expected = greedy_tokens(llm, continued)
    settings: list[dict[str, Any]] = [
        {},
        {"async_scheduling": True, "max_num_batched_tokens": 11, "max_num_seqs": 2},
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}},
        {"speculative_config": {"method": "custom", "model": "drafters:AtRandom"}},
    ]
    for options in settings:
        oracle = None if "speculative_config" in options else Oracle(whole, wrong=7)
        with open_llm(checkpoint, drafter=oracle, block_size=4, **options) as llm:
            ours = tokens_and_logprobs(llm, PROMPTS, DRAFTED)
            assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in alone]
            for (_, own), (_, theirs) in zip(ours, alone, strict=True):
                assert own == [pytest.approx(row, abs=1e-3) for row in theirs]
            assert oracle is None or oracle.num_accepted > 60
            # The next turns go on from states that drafts left, or passed over.
            before = llm.engine.stats().num_prefix_hits
            assert greedy_tokens(llm, continued) == expected
            hits, size = llm.engine.stats().num_prefix_hits - before, checkpoint_size(llm)
            assert hits == sum((len(tokens) - 2) // size * size for tokens in whole)


@pytest.mark.parametrize("variant", ["mamba2", "falcon_h1", "qwen3_next"])
def test_rejected_drafts_write_no_state(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every state in a block is one that a run without drafts has at the same place, bit by bit."""
    checkpoint = make_checkpoint(tmp_path, variant)
    options = {
        "enable_prefix_caching": False, "num_gpu_blocks_override": 200, "max_model_len": 256,
        "block_size": 4, "max_num_seqs": 1,
    }  # fmt: skip

    def states_of(drafter: Drafter | None) -> list[torch.Tensor]:
        with open_llm(checkpoint, drafter=drafter, **options) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, InProcessExecutor)
            assert executor.worker.runner is not None
            memory = executor.worker.runner.memory
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            tokens = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].token_ids
            outputs.append(PROMPTS[1]["prompt_token_ids"] + list(tokens))
            return [part.clone() for parts in memory.states.values() for part in parts]

    outputs: list[list[int]] = []
    expected = states_of(None)
    for drafter in (Stubborn(3), Oracle(outputs, wrong=7)):
        for ours, theirs in zip(states_of(drafter), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert outputs[1:] == outputs[:1] * 2


def test_a_head_that_drafts_costs_a_hybrid_model_no_cached_block(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "qwen3_next")
    head, _ = make_head(tmp_path / "head", target)
    found = []
    for config in (None, {"method": "eagle3", "model": str(head), "adaptive": False}):
        with open_llm(target, speculative_config=config, block_size=4) as llm:
            tokens = [greedy_tokens(llm, PROMPTS) for _ in range(2)]
            found.append((tokens, llm.engine.stats().num_prefix_hits))
            size = checkpoint_size(llm)
            lengths = [len(prompt["prompt_token_ids"]) for prompt in PROMPTS]
            assert found[-1][1] == sum((length - 1) // size * size for length in lengths) > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("variant", ["mamba2", "qwen3_next"])
def test_a_model_with_attention_drafts_for_one_without(variant: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", variant)
    draft = make_checkpoint(tmp_path / "draft", "llama")
    with open_llm(target, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = greedy_tokens(llm, PROMPTS)
    config = {"method": "draft_model", "model": str(draft), "adaptive": False}
    with open_llm(target, speculative_config=config, async_scheduling=True) as llm:
        for _ in range(2):
            assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.speculation_stats().num_draft_tokens > 100


def test_memory_for_the_inputs_of_drafts_is_part_of_the_cache(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "mamba2")
    layouts = []
    for drafter in (None, Stubborn(3)):
        with open_llm(checkpoint, drafter=drafter, kv_cache_memory_bytes=2**24) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, InProcessExecutor)
            assert executor.worker.runner is not None
            layouts.append(executor.worker.runner.memory.layout)
    plain, drafting = layouts
    assert plain.draft_input_bytes == 0 < drafting.draft_input_bytes
    assert drafting.num_blocks < plain.num_blocks
    for layout in layouts:
        assert 2**24 - layout.block_bytes < layout.total_bytes <= 2**24


@pytest.mark.parametrize(
    "variant",
    [
        "falcon_h1_normed",  # two groups, a rank has one
        pytest.param("mamba2_biased", marks=pytest.mark.slow),  # one, which both share
        pytest.param("qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_one_ranks_tokens(variant: str, tmp_path: Path) -> None:
    assert_ranks_agree(make_checkpoint(tmp_path, variant), PROMPTS)


@torch.inference_mode()
def test_a_rank_has_its_share_of_every_section_of_a_convolution() -> None:
    build = Build(
        torch.float32, torch.device("cpu"), 64, Ops("cpu"), mesh=Mesh(RankGroup(rank=3, size=4))
    )
    conv = CausalConv(build, [Part("x", 8, 4), Part("b", 4, 2)], 3, bias=True)
    conv.load("weight", "", torch.arange(12.0)[:, None, None].expand(12, 1, 3))
    conv.load("bias", "", torch.arange(12.0))
    assert conv.bias is not None
    assert conv.bias.tolist() == [6, 7, 10, 11]
    assert conv.weight.tolist() == [[row] * 3 for row in (6, 7, 10, 11)]


def test_a_mamba_says_no_word_of_attention_or_positions(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "mamba2")
    with open_llm(checkpoint) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    config = json.loads((checkpoint / "config.json").read_text())
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        del config[name]
    del config["max_position_embeddings"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with open_llm(checkpoint, max_model_len=5000) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("falcon_h1")))
    with open_llm(tmp_path, load_format="dummy") as llm:
        assert all(len(own) == 16 for own in greedy_tokens(llm, PROMPTS))


@pytest.mark.parametrize("variant", ["mamba2", "falcon_h1", "qwen3_next"])
def test_weights_and_keys_of_8_bits_leave_the_states_alone(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, quantization="int8", kv_cache_dtype="int8") as llm:
        assert all(len(own) == 16 for own in greedy_tokens(llm, PROMPTS))
        executor = llm.engine.executor
        assert isinstance(executor, InProcessExecutor)
        specs = executor.capabilities.kv_specs.values()
    assert {spec.dtypes for spec in specs if isinstance(spec, RecurrentSpec)} == {
        ("float32", "float32")
    }


@pytest.mark.parametrize(
    ("variant", "ranks", "message"),
    [
        ("mamba2", 3, "must divide the model's 8"),
        ("falcon_h1", 4, "must divide the model's 6 Mamba heads, got 4"),
        ("qwen3_next", 4, "must divide the model's 2 linear key heads, got 4"),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused(
    variant: str, ranks: int, message: str
) -> None:
    build = Build(
        torch.float32, torch.device("cpu"), 64, Ops("cpu"), mesh=Mesh(RankGroup(size=ranks))
    )
    with pytest.raises(ConfigError, match=message):
        build_model(config_of(variant), build)


def test_every_fourth_layer_attends_where_the_file_lists_none() -> None:
    raw = {**config_of("qwen3_next"), "layer_types": None}
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"))
    config = build_model(raw, build).config
    assert isinstance(config, DecoderConfig)
    assert [mixer_of_layer(config, index) for index in range(4)] == [LINEAR, LINEAR, LINEAR, FULL]


def test_null_for_the_keys_of_falcon_h1_is_one_for_each_query() -> None:
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"))
    config = build_model({**config_of("falcon_h1"), "num_key_value_heads": None}, build).config
    assert isinstance(config, DecoderConfig)
    assert config.num_kv_heads == config.num_heads == 4
