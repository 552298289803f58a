"""Everything at once, as in `test_any_mix`, in engines of several ranks.

With tensor, expert and pipeline parallelism, alone and together, each request gives what it gives
alone on one rank.
"""

from __future__ import annotations

import random
from copy import copy
from typing import Any

import pytest
from stages import local_stages, stages_of
from test_any_mix import (
    SPECULATION,
    TEXT_VARIANTS,
    VARIANTS,
    WITH_EXPERTS,
    Client,
    Model,
    assert_nothing_is_kept,
    engine,
    fail_sometimes,
    model,
    some_options,
)

from penstock import LLM

__all__ = ["local_stages", "model"]

EP = {"enable_expert_parallel": True}
BALANCED = {  # with a move of experts every few steps
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 1, "window_size": 3, "step_interval": 4},
}
GATHERED = {"all2all_backend": "allgather_reducescatter"}
TP_2, TP_4, DP_2 = (
    {f"{kind}_parallel_size": n} for kind, n in (("tensor", 2), ("tensor", 4), ("data", 2))
)
PP_2 = {"pipeline_parallel_size": 2}
SHORT = ("llama", "deepseek_v2_lite")  # whose models other tests of this file have, too


def cell(variant: str, *options: dict[str, Any], is_slow: bool = True) -> Any:
    """A model and how its ranks share it. Ranks take long to start."""
    ranks = {name: size for each in options for name, size in each.items()}
    sizes = {name: size for name, size in ranks.items() if name != "eplb_config"}
    names = "".join(f"-{name.partition('_')[0]}{size}" for name, size in sizes.items())
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(variant, ranks, id=variant + names, marks=marks)


CELLS = [
    *(cell(variant, TP_2, is_slow=variant != VARIANTS[0]) for variant in VARIANTS),
    *(cell(variant, TP_4) for variant in TEXT_VARIANTS if variant != "qwen3_next"),
    *(cell(variant, TP_2, PP_2) for variant in TEXT_VARIANTS),
    *(cell(variant, TP_2, EP, *more) for variant in WITH_EXPERTS for more in ([], [BALANCED])),
    *(cell(variant, TP_2, PP_2, EP) for variant in WITH_EXPERTS),
]


@pytest.mark.parametrize(("model", "ranks"), CELLS, indirect=["model"])
def test_ranks_give_what_one_gives_alone(model: Model, ranks: dict[str, Any]) -> None:
    rng = random.Random(7)
    options = {**some_options(rng, model.specs), "async_scheduling": True, **ranks}
    is_staged = PP_2.items() <= ranks.items()
    options["enable_return_routed_experts"] = model.has_experts and is_staged
    heads = [each for each in model.speculation if each["method"] == "eagle3"]
    settings = heads[0] if heads and is_staged else SPECULATION[1]
    options["speculative_config"] = {**settings, "adaptive": False}
    with engine(model.path, **options) as llm:
        check(llm, model, rng)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        cell("deepseek_v2_lite", DP_2, EP, GATHERED),
        cell("deepseek_v2_lite", DP_2, EP, GATHERED, BALANCED),
        cell("deepseek_v2_lite", DP_2, EP),
        cell("deepseek_v2_lite", DP_2, EP, BALANCED),
        cell("qwen3_next", DP_2, EP),
        cell("deepseek_v2_lite", DP_2, TP_2, EP),
    ],
    indirect=["model"],
)
def test_replicas_that_share_experts_give_what_one_rank_gives_alone(
    model: Model, ranks: dict[str, Any]
) -> None:
    rng = random.Random(7)
    options = {**some_options(rng, model.specs), **ranks, "async_scheduling": None}
    options["speculative_config"] = {**SPECULATION[1], "adaptive": False}
    with engine(model.path, **options) as llm:
        check(llm, model, rng)


def check(llm: LLM, model: Model, rng: random.Random) -> None:
    client = Client(llm, model, rng, rng.sample(range(len(model.cases)), len(model.cases)))
    client.run()
    assert client.num_compared + client.num_aborts == len(model.cases)
    assert_nothing_is_kept(llm)


STAGED = [
    pytest.param(variant, seed, marks=[pytest.mark.slow] if seed or variant not in SHORT else [])
    for variant in TEXT_VARIANTS
    for seed in range(20)
]


@pytest.mark.usefixtures("local_stages")
@pytest.mark.parametrize(("model", "seed"), STAGED, indirect=["model"])
def test_pipeline_stages_give_what_one_rank_gives_alone(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    options = {**some_options(rng, model.specs), **PP_2}
    options["async_scheduling"] = rng.choice([None, None, False])
    options["enable_return_routed_experts"] = model.has_experts and rng.random() < 0.3
    settings = [copy(each) for each in model.speculation]
    settings.append({"method": "draft_model", "model": str(model.path)})
    if seed % 4 != 1:
        options["speculative_config"] = {**rng.choice(settings), "adaptive": rng.random() < 0.3}
    with engine(model.path, **options) as llm:
        if rng.random() < 0.5:
            for stage in stages_of(llm):
                assert stage.runner is not None
                fail_sometimes(stage.runner, rng)
        check(llm, model, rng)
