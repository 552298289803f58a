"""A drafter of the speculators library as `model`: the model that it drafts for runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_eagle, make_head
from medusa_heads import make_heads
from tiny_engine import OPTIONS, greedy_tokens, open_llm, random_prompts

from penstock import AsyncLLM, SamplingParams
from penstock.protocol.errors import ConfigError, ModelError

PROMPTS = random_prompts("speculators", 1, 9, 40)


def make_drafter(folder: Path, verifier: str, kind: str = "eagle3", **changes: Any) -> str:
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 2}]
    settings = {
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": proposals,
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        }
    }
    if kind == "eagle":
        return str(make_eagle(folder, Path(verifier), speculators=True, **settings | changes))
    return str(make_head(folder, Path(verifier), speculators=True, **settings | changes)[0])


@pytest.fixture(scope="module")
def drafter(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_drafter(tmp_path_factory.mktemp("speculators") / "drafter", tiny_llama)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_its_verifier_runs_with_its_drafts(tiny_llama: str, tmp_path: Path, kind: str) -> None:
    drafter = make_drafter(tmp_path / "drafter", tiny_llama, kind)
    with open_llm(tiny_llama) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    with open_llm(drafter) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected
        assert llm.engine.limits.num_drafts == 2
        assert llm.engine.speculation_stats().num_draft_tokens > 0
        assert llm.config.model.model == tiny_llama
        assert llm.config.model.names == [drafter]
        settings = llm.config.speculative.settings
    assert settings is not None
    assert (settings.method, settings.model) == (kind, drafter)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_in_another_process_and_two_ranks_do_so_too(
    tiny_llama: str, drafter: str, size: int
) -> None:
    with open_llm(tiny_llama) as llm:
        expected = greedy_tokens(llm, PROMPTS[:1])

    async def run() -> list[int]:
        llm = AsyncLLM(drafter, **OPTIONS, tensor_parallel_size=size)
        await llm.start()
        try:
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            outputs = [output async for output in llm.generate(PROMPTS[0], params, "one")]
            assert llm.config.model.names == [drafter]
            return list(outputs[-1].outputs[0].token_ids)
        finally:
            await llm.close()

    assert asyncio.run(run()) == expected[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"speculators_model_type": "dflash"}, "'dflash' is not supported, only eagle and eagle3"),
        ({"speculators_model_type": None}, "None is not supported, only eagle and eagle3"),
        ({"speculators_config": None}, "names no model .*verifier.name_or_path.*: use the model"),
        (
            {"speculators_config": {"verifier": {"name_or_path": None}}},
            "names no model .*name_or_path",
        ),
        (
            {"speculators_config": {"verifier": {"name_or_path": "/no/such"}}},
            "the verifier of the drafter .*drafter cannot be loaded.*/no/such.*"
            'speculative_config {"method": "eagle3", "model": ".*drafter"}',
        ),
        *(
            (
                {
                    "speculators_config": {
                        "verifier": {"name_or_path": "x"},
                        "proposal_methods": [{"speculative_tokens": count}],
                    }
                },
                f"speculative_tokens must be an integer from 1 to 64, got {count}",
            )
            for count in (0, 65)
        ),
    ],
)
def test_what_names_no_verifier_is_refused(
    tiny_llama: str, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    drafter = make_drafter(tmp_path / "drafter", tiny_llama, **changes)
    with pytest.raises(ModelError, match=text):
        open_llm(drafter)


def test_it_brings_the_settings_of_speculation(tiny_llama: str, drafter: str) -> None:
    with pytest.raises(ConfigError, match=f"drop speculative_config, or use model {tiny_llama}"):
        open_llm(drafter, speculative_config={"method": "ngram"})


def test_another_type_as_a_drafter_is_refused_by_its_name(tiny_llama: str, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", tiny_llama, speculators_model_type="dflash")
    with pytest.raises(ModelError, match="'dflash' is not supported, only eagle and eagle3"):
        open_llm(tiny_llama, speculative_config={"method": "eagle3", "model": drafter})


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_head_that_names_no_verifier_is_refused_as_model(
    tiny_llama: str, tmp_path: Path, method: str
) -> None:
    if method == "eagle3":
        head, _ = make_head(tmp_path / "head", Path(tiny_llama))
    else:
        head = make_heads(tmp_path / "head", Path(tiny_llama))
    with pytest.raises(ConfigError, match=f'is a draft head.*"method": "{method}"'):
        open_llm(str(head))
    drafts = {"method": "draft_model", "model": str(head)}
    with pytest.raises(ConfigError, match=f"is a draft head: use method {method}"):
        open_llm(tiny_llama, speculative_config=drafts)
