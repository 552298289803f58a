"""Decoders that pool: vectors as transformers has them, whatever the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engine import open_llm, random_prompts
from tiny_models import make_checkpoint, transformers_config

from penstock import LLM, PoolingParams, SamplingParams
from penstock.executor.in_process import InProcessExecutor
from penstock.models.base import Hidden
from penstock.protocol.errors import ConfigError, InputError

LENGTHS = (1, 2, 5, 16, 31, 47, 64)
POOLING = {"runner": "pooling", "max_model_len": 64, "block_size": 8}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def states(checkpoint: Path) -> list[torch.Tensor]:
    return hidden_states(checkpoint)


def hidden_states(folder: Path, **kwargs: Any) -> list[torch.Tensor]:
    """transformers' own, [tokens, hidden_size] for each prompt, each computed alone."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()
    with torch.inference_mode():
        prompts = [torch.tensor([p["prompt_token_ids"]]) for p in random_prompts(0, *LENGTHS)]
        return [model(prompt).last_hidden_state[0] for prompt in prompts]


def pool(states: torch.Tensor, kind: str) -> torch.Tensor:
    rows = {"LAST": states[-1], "CLS": states[0], "MEAN": states.mean(0)}
    return torch.nn.functional.normalize(rows[kind], dim=-1)


def vectors(llm: LLM, *args: Any, **kwargs: Any) -> list[Any]:
    outputs = llm.embed(random_prompts(0, *LENGTHS), *args, use_tqdm=False, **kwargs)
    return [output.outputs.embedding for output in outputs]


def assert_close(found: Any, expected: torch.Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("step_tokens", [1, 7, 24, 2048])
def test_embeddings_are_those_of_transformers_for_any_chunks(
    checkpoint: Path, states: list[torch.Tensor], kind: str, step_tokens: int
) -> None:
    options = {"max_num_batched_tokens": step_tokens, "pooler_config": {"pooling_type": kind}}
    with open_llm(checkpoint, **POOLING, **options) as llm:
        for _ in range(2):  # the second time, prefixes are cached where they may be
            for found, expected in zip(vectors(llm), states, strict=True):
                assert_close(found, pool(expected, kind))
        hits = llm.engine.stats().num_prefix_hits
    assert (hits > 0) == (kind == "LAST")


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_embeddings_are_the_same_after_preemptions(
    checkpoint: Path, states: list[torch.Tensor], kind: str
) -> None:
    options = {
        "max_num_batched_tokens": 16,
        "long_prefill_token_threshold": 5,  # so that several prompts grow side by side
        "num_gpu_blocks_override": 10,
        "enable_prefix_caching": False,
        "pooler_config": {"pooling_type": kind},
    }
    longest_first = random_prompts(0, *LENGTHS)[::-1]
    with open_llm(checkpoint, **POOLING, **options) as llm:
        outputs = llm.embed(longest_first, use_tqdm=False)
        for output, expected in zip(outputs, states[::-1], strict=True):
            assert_close(output.outputs.embedding, pool(expected, kind))
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_embeddings_are_the_same_after_a_step_failed(
    checkpoint: Path, states: list[torch.Tensor], kind: str
) -> None:
    """Its requests are computed anew: what they had summed up counts once."""
    options = {"max_num_batched_tokens": 7, "pooler_config": {"pooling_type": kind}}
    with open_llm(checkpoint, **POOLING, **options) as llm:
        assert isinstance(llm.engine.executor, InProcessExecutor)
        model: Any = llm.engine.executor.worker.model
        forward, failures = model.forward, []

        def failing(x: torch.Tensor, positions: torch.Tensor) -> Any:
            hidden = forward(x, positions)
            # One prompt's end and another's begin: of a request alone, a failure is the result.
            if positions[0] > 0 and (positions.diff() != 1).any() and not failures:
                failures.append(positions)
                raise RuntimeError("this step fails")
            return hidden

        model.forward = failing
        for found, expected in zip(vectors(llm), states, strict=True):
            assert_close(found, pool(expected, kind))
        assert failures


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("step_tokens", [24, 2048])
def test_vectors_are_float32_whatever_the_states_are(
    checkpoint: Path, states: list[torch.Tensor], kind: str, step_tokens: int
) -> None:
    """bfloat16 has 8 bits: a sum, a length or a vector in it would be off by 1e-3."""
    options = {"max_num_batched_tokens": step_tokens, "pooler_config": {"pooling_type": kind}}
    with open_llm(checkpoint, **POOLING, **options, enable_prefix_caching=False) as llm:
        assert isinstance(llm.engine.executor, InProcessExecutor)
        model: Any = llm.engine.executor.worker.model
        forward = model.forward
        model.forward = lambda *args: Hidden(forward(*args).states.bfloat16())
        found = vectors(llm)
        raw = vectors(llm, PoolingParams(use_activation=False))
        model.forward = forward
        by_token = llm.encode(
            random_prompts(0, *LENGTHS),
            PoolingParams(task="token_embed", use_activation=False),
            use_tqdm=False,
        )
    for own, unscaled, rows in zip(found, raw, by_token, strict=True):
        rounded = torch.tensor(rows.outputs.data).bfloat16().double()
        expected = {"LAST": rounded[-1], "CLS": rounded[0], "MEAN": rounded.mean(0)}[kind]
        assert own.dtype == unscaled.dtype == np.float32
        np.testing.assert_allclose(unscaled, expected, atol=2e-6, rtol=2e-6)
        unit = expected / expected.norm()
        np.testing.assert_allclose(own, unit, atol=1e-6)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_of_pooling_requests_gives_what_each_gives_alone(
    checkpoint: Path, states: list[torch.Tensor], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["LAST", "MEAN", "CLS"]))
    options = {
        "max_num_batched_tokens": data.draw(st.integers(1, 80)),
        "max_num_seqs": data.draw(st.integers(1, 5)),
        "num_gpu_blocks_override": data.draw(st.integers(10, 40)),
        "enable_prefix_caching": data.draw(st.booleans()),
        "async_scheduling": data.draw(st.booleans()),
        "long_prefill_token_threshold": data.draw(st.sampled_from([0, 5])),
        "pooler_config": {"pooling_type": kind},
    }
    prompts = random_prompts(0, *LENGTHS)
    wishes = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(prompts) - 1),
                st.sampled_from(["embed", "token_embed"]),
                st.sampled_from([None, False]),
            ),
            min_size=1,
            max_size=12,
        )
    )
    from penstock.text.pooling import prepare_pooling

    with open_llm(checkpoint, **POOLING, **options) as llm:
        requests = [
            prepare_pooling(
                llm.frontend,
                str(index),
                prompts[place]["prompt_token_ids"],
                PoolingParams(task=task, use_activation=activation),  # type: ignore[arg-type]
            ).pieces[0]
            for index, (place, task, activation) in enumerate(wishes)
        ]
        leavers = data.draw(st.sets(st.integers(0, len(wishes) - 1), max_size=2))
        for request in requests:
            llm.engine.add(request)
        found, num_steps = {}, 0
        while llm.engine.has_work():
            for delta in llm.engine.step():
                if delta.payload is not None:
                    found[int(delta.request_id)] = delta.payload.to_numpy()
            num_steps += 1
            if num_steps == 2:
                llm.engine.abort([str(index) for index in leavers])
        for index, (place, task, activation) in enumerate(wishes):
            if index not in found:
                assert index in leavers
                continue
            rows = states[place]
            if task == "embed":
                rows = {"LAST": rows[-1], "CLS": rows[0], "MEAN": rows.mean(0)}[kind]
            if activation is None:
                rows = torch.nn.functional.normalize(rows, dim=-1)
            np.testing.assert_allclose(found[index], rows.numpy(), atol=1e-3, rtol=1e-3)
        assert isinstance(llm.engine.executor, InProcessExecutor)
        assert not llm.engine.executor.runner.tables.request_ids or not llm.engine.has_work()


def test_every_token_has_a_vector_where_that_is_asked_for(
    checkpoint: Path, states: list[torch.Tensor]
) -> None:
    with open_llm(checkpoint, **POOLING, max_num_batched_tokens=9) as llm:
        outputs = llm.encode(
            random_prompts(0, *LENGTHS), pooling_task="token_embed", use_tqdm=False
        )
    for output, expected in zip(outputs, states, strict=True):
        assert_close(output.outputs.data, torch.nn.functional.normalize(expected, dim=-1))


def test_vectors_are_not_normalized_where_that_is_asked_for(
    checkpoint: Path, states: list[torch.Tensor]
) -> None:
    with open_llm(checkpoint, **POOLING) as llm:
        found = vectors(llm, PoolingParams(use_activation=False))
    for vector, expected in zip(found, states, strict=True):
        np.testing.assert_allclose(vector, expected[-1].numpy(), atol=1e-3)


def test_a_cut_embedding_is_normalized_anew(checkpoint: Path, states: list[torch.Tensor]) -> None:
    with open_llm(checkpoint, **POOLING, pooler_config={"dimensions": [8, 32]}) as llm:
        for vector, expected in zip(vectors(llm, PoolingParams(dimensions=8)), states, strict=True):
            assert_close(vector, torch.nn.functional.normalize(expected[-1, :8], dim=-1))
        with pytest.raises(InputError, match="dimensions must be one of 8, 32, 64, got 9"):
            vectors(llm, PoolingParams(dimensions=9))


def test_dimensions_are_refused_where_the_model_does_not_say_that_it_knows_them(
    checkpoint: Path,
) -> None:
    with open_llm(checkpoint, **POOLING) as llm:
        with pytest.raises(InputError, match="matryoshka") as caught:
            vectors(llm, PoolingParams(dimensions=8))
        assert caught.value.field == "dimensions"


def test_a_checkpoint_without_a_head_is_an_embedder_of_itself(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    transformers.Qwen2Model(transformers_config("qwen2")).float().save_pretrained(tmp_path)
    with open_llm(tmp_path, max_model_len=64) as llm:
        assert llm.frontend.pooling is not None
        for found, expected in zip(vectors(llm), hidden_states(tmp_path), strict=True):
            assert_close(found, pool(expected, "LAST"))


@pytest.fixture(scope="module")
def bidirectional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", is_causal=False)


def test_a_decoder_that_is_not_causal_reads_whole_prompts(bidirectional: Path) -> None:
    import transformers

    model = transformers.AutoModel.from_pretrained(
        bidirectional, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with open_llm(bidirectional, **POOLING, pooler_config={"pooling_type": "MEAN"}) as llm:
        assert not llm.engine.limits.enable_chunked_prefill
        found = vectors(llm)
    for vector, prompt in zip(found, random_prompts(0, *LENGTHS), strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        with torch.inference_mode():
            hidden = model(ids, attention_mask={"full_attention": mask}).last_hidden_state[0]
        assert_close(vector, pool(hidden, "MEAN"))


def test_a_step_that_cannot_hold_the_longest_whole_prompt_is_refused(bidirectional: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(63\).*max_model_len \(64\)"):
        open_llm(bidirectional, **POOLING, max_num_batched_tokens=63)


def test_a_prompt_may_be_as_long_as_the_context(checkpoint: Path) -> None:
    with open_llm(checkpoint, **POOLING) as llm:
        assert len(llm.embed(random_prompts(1, 64), use_tqdm=False)) == 1
        with pytest.raises(InputError, match="has 65 tokens") as caught:
            llm.embed(random_prompts(1, 65), use_tqdm=False)
        assert "truncate_prompt_tokens" in str(caught.value)
        (cut,) = llm.embed(random_prompts(1, 65), use_tqdm=False, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 64


def test_what_a_model_is_not_for_is_refused(checkpoint: Path) -> None:
    with open_llm(checkpoint, **POOLING) as llm:
        with pytest.raises(InputError, match="generates no text"):
            llm.generate(random_prompts(1, 4), SamplingParams(), use_tqdm=False)
        with pytest.raises(InputError, match="generates no text"):
            llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)
        with pytest.raises(InputError, match="task 'classify'"):
            llm.classify(random_prompts(1, 4), use_tqdm=False)
        with pytest.raises(InputError, match="gives no rewards"):
            llm.reward(random_prompts(1, 4), use_tqdm=False)
    with open_llm(checkpoint) as llm, pytest.raises(InputError, match="--runner pooling"):
        llm.embed(random_prompts(1, 4), use_tqdm=False)


@pytest.mark.parametrize("step_tokens", [5, 2048])
def test_a_vector_of_nan_is_an_error_and_harms_no_other(
    checkpoint: Path, states: list[torch.Tensor], step_tokens: int
) -> None:
    with open_llm(
        checkpoint,
        **POOLING,
        max_num_batched_tokens=step_tokens,
        pooler_config={"pooling_type": "MEAN"},
    ) as llm:
        assert isinstance(llm.engine.executor, InProcessExecutor)
        model: Any = llm.engine.executor.worker.model
        embed, bad = model.embed, 255
        prompts = [
            {"prompt_token_ids": [t % 255 for t in p["prompt_token_ids"]]}
            for p in random_prompts(0, *LENGTHS)
        ]
        clean = llm.embed(prompts, use_tqdm=False)

        def poisoned(token_ids: torch.Tensor) -> torch.Tensor:
            x = embed(token_ids)
            return torch.where((token_ids == bad)[:, None], torch.nan, x)

        model.embed = poisoned
        prompts[3]["prompt_token_ids"][2] = bad
        outputs = llm.embed(prompts, use_tqdm=False)
    for index, (output, before) in enumerate(zip(outputs, clean, strict=True)):
        if index == 3:
            assert output.error is not None
            assert "NaN" in output.error
            assert output.outputs.embedding is None
        else:
            assert output.error is None
            np.testing.assert_allclose(
                output.outputs.embedding, before.outputs.embedding, atol=TOLERANCE
            )


def test_a_longer_text_is_the_mean_of_its_pieces_each_by_its_tokens(
    checkpoint: Path,
) -> None:
    long = {"prompt_token_ids": random_prompts(2, 150)[0]["prompt_token_ids"]}
    pieces = [{"prompt_token_ids": long["prompt_token_ids"][at : at + 64]} for at in (0, 64, 128)]
    chunked = {"enable_chunked_processing": True, "max_embed_len": 150, "dimensions": [8]}
    with open_llm(checkpoint, **POOLING, pooler_config=chunked) as llm:
        raw = llm.embed(pieces, PoolingParams(use_activation=False), use_tqdm=False)
        vectors = [output.outputs.embedding for output in raw]
        expected = np.average(vectors, axis=0, weights=[64, 64, 22])
        (whole,) = llm.embed(long, use_tqdm=False)
        (cut,) = llm.embed(long, PoolingParams(dimensions=8), use_tqdm=False)
        (as_is,) = llm.embed(long, PoolingParams(use_activation=False), use_tqdm=False)
        assert whole.prompt_token_ids == long["prompt_token_ids"]
        with pytest.raises(InputError, match="has 151 tokens"):
            llm.embed(random_prompts(2, 151), use_tqdm=False)
    np.testing.assert_allclose(as_is.outputs.embedding, expected, atol=TOLERANCE)
    np.testing.assert_allclose(
        whole.outputs.embedding, expected / np.linalg.norm(expected), atol=TOLERANCE
    )
    np.testing.assert_allclose(
        cut.outputs.embedding, expected[:8] / np.linalg.norm(expected[:8]), atol=TOLERANCE
    )


def test_pieces_of_longer_texts_need_a_length(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="must be set together"):
        open_llm(checkpoint, **POOLING, pooler_config={"enable_chunked_processing": True})


def test_two_ranks_pool_as_one_does(checkpoint: Path, states: list[torch.Tensor]) -> None:
    options = {"pooler_config": {"pooling_type": "MEAN"}, "max_num_batched_tokens": 24}
    with open_llm(checkpoint, **POOLING, **options, tensor_parallel_size=2) as llm:
        for found, expected in zip(vectors(llm), states, strict=True):
            assert_close(found, pool(expected, "MEAN"))
