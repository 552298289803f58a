"""Models without KV groups, under the whole engine."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import make_checkpoint
from without_kv import encode, forget

PROMPTS = [*random_prompts(3, 1, 9, 40, 200), {"prompt_token_ids": [7]}]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True, "max_num_batched_tokens": 16}])
def test_a_model_that_keeps_nothing_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, options: dict[str, object]
) -> None:
    forget(monkeypatch)
    checkpoint = make_checkpoint(tmp_path, "llama")
    last = [{"prompt_token_ids": prompt["prompt_token_ids"][-1:]} for prompt in PROMPTS]
    with open_llm(checkpoint, cpu_backend=backend, **options) as llm:
        found = greedy_tokens(llm, PROMPTS)
        assert found == greedy_tokens(llm, last) == greedy_tokens(llm, PROMPTS)
        follower = {7: found[-1][0]}
        for tokens in found:
            for token, following in itertools.pairwise(tokens):
                assert follower.setdefault(token, following) == following
    assert len(follower) > 10


def test_an_encoders_prompts_do_not_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(monkeypatch)
    with open_llm(make_checkpoint(tmp_path, "llama"), max_num_batched_tokens=512) as llm:
        alone = [greedy_tokens(llm, [prompt], 1)[0] for prompt in PROMPTS]
        assert greedy_tokens(llm, PROMPTS, 1) == alone
