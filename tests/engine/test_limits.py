"""The limits of a step are resolved once, and everyone reads the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_checkpoint

from penstock import LLM
from penstock.config import DeviceConfig, EngineConfig
from penstock.executor.in_process import InProcessExecutor
from penstock.models.runtime import resolve_limits
from penstock.platforms.platform import detect_platform
from penstock.protocol.errors import ConfigError

SETTINGS = {"max_position_embeddings": 128}


def resolve(**options: Any) -> Any:
    return resolve_limits(
        EngineConfig.from_options(options), SETTINGS, detect_platform(DeviceConfig(device="cpu"))
    )


def test_without_chunked_prefill_a_step_must_hold_the_longest_request() -> None:
    assert resolve(enable_chunked_prefill=False, max_num_batched_tokens=128).max_model_len == 128
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(127\) must be at least"):
        resolve(enable_chunked_prefill=False, max_num_batched_tokens=127)


def test_a_step_is_as_long_as_the_longest_request_where_it_must_be() -> None:
    assert resolve(enable_chunked_prefill=False, max_num_seqs=1).max_num_batched_tokens >= 128


def test_the_limits_that_the_cache_lowers_are_the_runners_and_the_schedulers(
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path, "llama")
    options = {"num_gpu_blocks_override": 4, "skip_tokenizer_init": True, "device": "cpu"}
    with LLM(str(model), log_level="error", **options) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, InProcessExecutor)
        limits = llm.engine.limits
        assert limits.max_model_len == 48, "three blocks of 16 tokens"
        assert limits is llm.engine.scheduler.limits
        width = executor.runner.tables.token_ids.shape[1]
        assert 48 <= width < executor.capabilities.limits.max_model_len
        assert llm.frontend.max_model_len == 48
