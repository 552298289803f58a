"""Several completions of a prompt, output kinds, and the limits between which text is made."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import open_llm

from penstock import LLM, RequestOutputKind, SamplingParams
from penstock.protocol.errors import ConfigError
from penstock.text.frontend import child_seed

PROMPT = {"prompt_token_ids": [4, 5, 6, 7]}


@pytest.fixture(scope="module")
def llm(tiny_llama: str) -> LLM:
    return open_llm(tiny_llama)


def generate(llm: LLM, **options: Any) -> list[Any]:
    return llm.generate(PROMPT, SamplingParams(**options), use_tqdm=False)[0].outputs


def test_n_completions_are_those_of_their_own_seeds(llm: LLM) -> None:
    together = generate(llm, n=3, seed=9, temperature=1.0, max_tokens=12)
    assert [output.index for output in together] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in together}) == 3
    for index, output in enumerate(together):
        (alone,) = generate(llm, seed=child_seed(9, index), temperature=1.0, max_tokens=12)
        assert alone.token_ids == output.token_ids


def test_requests_without_a_seed_differ_and_a_new_engine_repeats_them(tiny_llama: str) -> None:
    runs = []
    for _ in range(2):
        with open_llm(tiny_llama, seed=3) as llm:
            runs.append([generate(llm, temperature=1.0)[0].token_ids for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_min_tokens_holds_back_the_end_of_text(llm: LLM) -> None:
    everything = list(range(256))
    (early,) = generate(llm, temperature=0, max_tokens=20, stop_token_ids=everything)
    assert len(early.token_ids) == 1
    assert early.stop_reason == early.token_ids[0]
    rare = [token for token in everything if token % 2]
    (late,) = generate(llm, temperature=0, max_tokens=20, min_tokens=6, stop_token_ids=rare)
    assert len(late.token_ids) > 6
    assert all(token % 2 == 0 for token in late.token_ids[:6])


def test_only_allowed_tokens_are_chosen(llm: LLM) -> None:
    allowed = [10, 20, 30]
    (output,) = generate(
        llm, temperature=1.0, seed=1, max_tokens=20, allowed_token_ids=allowed, ignore_eos=True
    )
    assert set(output.token_ids) <= set(allowed)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stream_shows_what_its_kind_says(llm: LLM, kind: RequestOutputKind) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "n": 2}
    whole = [output.token_ids for output in generate(llm, **options)]
    shown = list(llm.stream(PROMPT, SamplingParams(output_kind=kind, **options)))
    assert [output.finished for output in shown] == [False] * (len(shown) - 1) + [True]
    pieces: list[list[list[int]]] = [[], []]
    for output in shown:
        for completion in output.outputs:
            pieces[completion.index].append(completion.token_ids)
    for index in range(2):
        if kind is RequestOutputKind.DELTA:
            assert [token for piece in pieces[index] for token in piece] == whole[index]
        else:
            assert pieces[index][-1] == whole[index]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(shown) == 1


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    next(iter(stream))
    assert llm.engine.stats().kv_cache_usage > 0
    stream.close()
    assert llm.engine.stats().kv_cache_usage == 0
    assert llm.engine.stats().num_running == 0


def test_a_stream_and_a_batch_at_the_same_time_do_not_get_into_each_others_way(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    (expected,) = generate(llm, max_tokens=8, **options)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=8, **options))
    first = next(stream)
    assert len(generate(llm, max_tokens=20, **options)[0].token_ids) == 20
    rest = list(stream)
    assert not first.finished
    assert rest[-1].finished
    assert rest[-1].outputs[0].token_ids == expected.token_ids


def test_the_default_sampling_params_handed_out_are_a_copy(llm: LLM) -> None:
    mine = llm.get_default_sampling_params()
    mine.max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens == 16


def test_the_default_sampling_params_can_be_set(tiny_llama: str) -> None:
    with open_llm(tiny_llama, override_generation_config={"temperature": 0.5}) as llm:
        assert llm.get_default_sampling_params().temperature == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "override_generation_config: temperature must be at least 0"),
        ({"max_tokens": 5}, "override_generation_config may contain temperature, .* 'max_tokens'"),
    ],
)
def test_wrong_default_sampling_params_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("any", override_generation_config=given)


def test_cached_prompt_tokens_are_counted(tiny_llama: str) -> None:
    prompt = {"prompt_token_ids": list(range(40))}
    params = SamplingParams(temperature=0, max_tokens=2)
    with open_llm(tiny_llama) as llm:
        counts = [
            llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)
        ]
        salted = llm.generate({**prompt, "cache_salt": "x"}, params, use_tqdm=False)[0]
    assert counts == [0, 32]
    assert salted.num_cached_tokens == 0


def test_the_prefix_cache_can_be_emptied_while_a_stream_goes_on(tiny_llama: str) -> None:
    prompt = {"prompt_token_ids": list(range(40))}
    params = SamplingParams(temperature=0, max_tokens=8)
    with open_llm(tiny_llama) as llm:
        (expected,) = llm.generate(prompt, params, use_tqdm=False)
        stream = llm.stream(prompt, params)
        assert next(stream).num_cached_tokens == 32
        assert llm.reset_prefix_cache()
        (anew,) = llm.generate(prompt, params, use_tqdm=False)
        *_, last = stream
        (again,) = llm.generate(prompt, params, use_tqdm=False)
    assert (anew.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    for output in (anew, last, again):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_prompt_that_was_never_seen_counts_as_computed_for_all_its_completions(
    tiny_llama: str,
) -> None:
    prompt = {"prompt_token_ids": list(range(40))}
    params = SamplingParams(temperature=0, max_tokens=2, n=2)
    with open_llm(tiny_llama, max_num_seqs=1) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_named_tokens_have_the_logprobs_that_they_have_among_all(llm: LLM) -> None:
    options: Any = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    (named,) = generate(llm, logprob_token_ids=[9, 4], **options)
    (plain,) = generate(llm, logprobs=20, **options)
    assert named.token_ids == plain.token_ids
    assert named.cumulative_logprob == pytest.approx(plain.cumulative_logprob)
    for token_id, ours, theirs in zip(named.token_ids, named.logprobs, plain.logprobs, strict=True):
        assert list(ours) == list(dict.fromkeys([token_id, 9, 4]))
        for other in {9, 4} & set(theirs):
            assert ours[other].logprob == pytest.approx(theirs[other].logprob)
        assert ours[token_id].rank == 1
        assert all(entry.rank is None for other, entry in ours.items() if other != token_id)


def test_the_logprobs_of_a_prompt_are_computed_once_for_all_its_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, prompt_logprobs=1)
    prepared = llm.frontend.prepare("r", PROMPT["prompt_token_ids"], params)
    asked = [child.params.prompt_logprobs for child in prepared.children]
    assert asked == [1, None, None]
    assert [child.read_prefix_cache for child in prepared.children] == [False, True, True]
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert [entry is None for entry in output.prompt_logprobs] == [True, False, False, False]
