"""Pipeline stages give one rank's tokens. Here they run in one process, one after the other."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import make_eagle, make_head
from mtp_targets import make_target
from stages import QueueLink, local_stages, stages_of
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import config_of, make_checkpoint

from penstock import SamplingParams
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.engine import build
from penstock.layers.build import Build
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, ModelError
from penstock.runner.drafter import Drafts, DraftStep
from penstock.runner.drafters.head import HeadDrafter

__all__ = ["local_stages"]
pytestmark = pytest.mark.usefixtures("local_stages")

CPU = torch.device("cpu")

SHORT = ["llama_tied_biased", "qwen3_moe", "deepseek_v3", "gemma3", "qwen3_next", "gpt_oss"]
LONG = ["llama", "mixtral", "mamba2", "falcon_h1", "llama4", "olmo2", "cohere", "starcoder2"]
LONG += ["granite", "glm4_moe", "minimax_m2", "exaone4_windowed", "smollm3_windowed"]
PROMPTS = random_prompts(3, 2, 9, 33, 60, 7)
SEEDED = SamplingParams(temperature=0.9, seed=1, max_tokens=12, repetition_penalty=1.1)


def tokens(checkpoint: Path, **options: Any) -> list[list[list[int]]]:
    with open_llm(checkpoint, max_num_batched_tokens=24, **options) as llm:
        seeded = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
        return [greedy_tokens(llm, PROMPTS), [each.outputs[0].token_ids for each in seeded]]


@pytest.mark.parametrize(
    "variant", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_stages_give_one_ranks_tokens(variant: str, tmp_path: Path) -> None:
    """With prompts in chunks, and more requests than a stage's share."""
    checkpoint = make_checkpoint(tmp_path, variant)
    assert tokens(checkpoint, pipeline_parallel_size=2) == tokens(checkpoint)


DRAFTED = [
    ("llama", {"method": "custom", "model": "drafters:AtRandom"}),
    ("qwen3_next", {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}),
    ("qwen2_windowed", {"method": "draft_model", "model": "itself"}),
    ("llama", {"method": "eagle", "model": "head"}),
    ("llama", {"method": "eagle3", "model": "head"}),
    ("deepseek_v3", {"method": "mtp"}),
]


def make_drafted(
    folder: Path, variant: str, settings: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and speculation with what drafts for it."""
    make = make_target if settings["method"] == "mtp" else make_checkpoint
    checkpoint = make(folder, variant)
    settings = {**settings, "adaptive": False}
    if settings.get("model") == "itself":
        settings["model"] = str(checkpoint)
    elif settings["method"] == "eagle":
        settings["model"] = str(make_eagle(folder / "head", checkpoint))
    elif settings["method"] == "eagle3":
        settings["model"] = str(make_head(folder / "head", checkpoint)[0])
    return checkpoint, settings


@pytest.mark.parametrize(("variant", "settings"), DRAFTED)
def test_stages_verify_drafts(variant: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """All stages go back to the accepted ones, also those with recurrent layers."""
    checkpoint, settings = make_drafted(tmp_path, variant, settings)
    expected = tokens(checkpoint)
    with open_llm(
        checkpoint, max_num_batched_tokens=24, pipeline_parallel_size=2, speculative_config=settings
    ) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected[0]
        seeded = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in seeded] == expected[1]
        found = llm.engine.speculation_stats()
        assert found.num_draft_tokens >= found.num_accepted_tokens > 0


@pytest.mark.parametrize(("variant", "settings"), DRAFTED[-3:])
def test_heads_draft_on_the_last_stage_what_they_draft_on_one_rank(
    variant: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few of these drafts are accepted, so the tokens say little about them."""
    checkpoint, settings = make_drafted(tmp_path, variant, settings)
    of_each = [drafts_of(checkpoint, settings, stages, monkeypatch) for stages in (1, 2)]
    assert of_each[0] == of_each[1] != []


@pytest.mark.parametrize("layers", [[3, 0], [5, 1], [2, 2]])
def test_a_head_reads_layers_of_any_stages(
    layers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order. The second of three stages hands on what the first one has."""
    checkpoint = make_checkpoint(tmp_path, "llama", num_hidden_layers=6)
    head, _ = make_head(tmp_path / "head", checkpoint, eagle_aux_hidden_state_layer_ids=layers)
    settings = {"method": "eagle3", "model": str(head), "adaptive": False}
    of_each = [drafts_of(checkpoint, settings, stages, monkeypatch) for stages in (1, 3)]
    assert of_each[0] == of_each[1] != []


def drafts_of(
    checkpoint: Path, settings: dict[str, Any], stages: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """What a head drafts in so many stages."""
    propose, found = HeadDrafter.propose, list[list[int]]()

    def recorded(drafter: HeadDrafter, step: DraftStep) -> Drafts:
        drafts = propose(drafter, step)
        assert drafts.token_ids is not None
        found.extend(drafts.token_ids.tolist())
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(HeadDrafter, "propose", recorded)
        with open_llm(
            checkpoint, pipeline_parallel_size=stages, speculative_config=settings
        ) as llm:
            greedy_tokens(llm, random_prompts(3, 30))  # alone: its steps are the same
    return found


@pytest.mark.parametrize(
    ("variant", "stages"), [("qwen3_moe", 3), ("deepseek_v2", 2)], ids=["second", "first"]
)
def test_routed_experts_of_all_stages_are_returned(
    variant: str, stages: int, tmp_path: Path
) -> None:
    """One of the stages has no layer with experts."""
    checkpoint = make_checkpoint(tmp_path, variant)
    settings = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    options = {"enable_return_routed_experts": True, "speculative_config": settings}
    of_each = []
    for size in (1, stages):
        with open_llm(
            checkpoint, max_num_batched_tokens=24, pipeline_parallel_size=size, **options
        ) as llm:
            outputs = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
        found = [output.outputs[0].routed_experts for output in outputs]
        of_each.append([own.tolist() for own in found if own is not None])
    assert of_each[0] == of_each[1]
    assert len(of_each[0]) == len(PROMPTS)


@pytest.mark.parametrize("stages", [1, 2])
def test_routed_experts_need_a_model_with_experts(stages: int, tmp_path: Path) -> None:
    options = {"enable_return_routed_experts": True, "pipeline_parallel_size": stages}
    with pytest.raises(ConfigError, match="enable_return_routed_experts is for models with"):
        open_llm(make_checkpoint(tmp_path, "llama"), **options)


def test_states_on_their_way_do_not_change_with_the_next_step() -> None:
    """Which overwrites what the graphs of a GPU have computed."""
    queues: list[deque[torch.Tensor]] = [deque(), deque()]
    first, second = (QueueLink(RankGroup(rank, 2), CPU, queues) for rank in range(2))
    states = tuple(torch.full((3, 4), float(value)) for value in (1, 2, 3))
    first.send(states)
    for each in states:
        each.zero_()
    received = second.receive()
    assert received is not None
    assert [each.unique().tolist() for each in received] == [[1.0], [2.0], [3.0]]


def test_a_stage_has_its_layers_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    with open_llm(checkpoint, pipeline_parallel_size=3, cpu_backend="torch") as llm:
        found = [
            {name.removeprefix("model.") for name, _ in stage.model.named_parameters()}
            for stage in stages_of(llm)
        ]
    layers = [{name.split(".")[1] for name in own if name.startswith("layers")} for own in found]
    assert layers == [{"0"}, {"1", "2"}, {"3", "4"}]
    rest = [{name for name in own if not name.startswith("layers")} for own in found]
    assert rest == [{"embed_tokens.weight"}, set(), {"norm.weight", "lm_head.weight"}]


def test_each_stage_caches_its_layers_and_the_smallest_cache_counts(tmp_path: Path) -> None:
    """Of five layers, the second stage has three."""
    checkpoint = make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    with open_llm(checkpoint) as llm:
        whole = llm.engine.scheduler.kv.pool.num_usable + 1
    with open_llm(checkpoint, pipeline_parallel_size=2) as llm:
        assert llm.engine.scheduler.kv.pool.num_usable + 1 == whole * 5 // 3
        runners = [stage.runner for stage in stages_of(llm)]
        assert [len(runner.memory.caches) for runner in runners if runner] == [2, 3]


def test_groups_of_layers_are_divided_among_stages(tmp_path: Path) -> None:
    """So a stage needs no buffer for the layers of others."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 3
    checkpoint = make_checkpoint(tmp_path, "gemma3", num_hidden_layers=12, layer_types=kinds)
    with open_llm(checkpoint, pipeline_parallel_size=2) as llm:
        for stage in stages_of(llm):
            assert stage.runner is not None
            layout = stage.runner.memory.layout
            sizes = [len(group.layer_names) for group in layout.groups]
            assert max(sizes) - min(sizes) <= 1, sizes


def test_steps_in_flight_share_the_requests(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    with open_llm(checkpoint, pipeline_parallel_size=2) as llm:
        launch, sizes = llm.engine.executor.launch, []

        def counted(plan: Any) -> None:
            sizes.append((len(plan.scheduled), len(llm.engine._in_flight)))
            launch(plan)

        llm.engine.executor.launch = counted  # type: ignore[method-assign]
        greedy_tokens(llm, random_prompts(1, 3, 4, 5, 6), 12)
    decodes = sizes[4:-4]  # once both steps have their requests
    assert set(decodes) == {(2, 2)}


def build_of(stages: int) -> Build:
    mesh = Mesh(pp=RankGroup(0, stages))
    return Build(torch.float32, CPU, 64, Ops("cpu"), mesh=mesh)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size must be at most 2.* got 3"):
        build_model({**config_of("llama"), "num_hidden_layers": 2}, build_of(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 99}, "pipeline_parallel_size must be at most 2.* got 99"),
        ({"tensor_parallel_size": 3}, "must divide the model's 4 .* got 3; 1, 2, 4 would do"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], message: str
) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    monkeypatch.setattr(build, "MultiProcessExecutor", lambda _: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=message):
        open_llm(checkpoint, **options)


def test_models_without_stages_are_refused() -> None:
    with pytest.raises(ModelError, match="use tensor_parallel_size instead"):
        build_model(config_of("llama"), build_of(2), "transformers")
