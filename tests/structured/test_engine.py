"""A grammar holds whatever the engine does around the request, and changes nothing for others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from byte_model import open_llm
from drafters import Oracle
from tiny_engine import prepare_replay

from penstock import LLM, SamplingParams
from penstock import StructuredOutputsParams as Structured
from penstock.runner import generation

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["é", "日本", "plain"]},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
WHOLE = r'\{"name":".*","kind":"(é|日本|plain)","size":\d\d\}'
SPECS = {
    "json": Structured(json=SCHEMA, disable_any_whitespace=True),
    "regex": Structured(regex="(ab|é€|x[0-9]{3}){4}!"),
    "choice": Structured(choice=["first", "second", "third"]),
    "grammar": Structured(grammar='start: "(" start? ")" | "日本"'),
    "after reasoning": Structured(regex="[0-9]{5}", reasoning_end="7"),
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "top_p": 0.98},
    {"temperature": 0.9, "seed": 8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
]
PROMPTS = ["Some text: ", "A longer beginning, which takes several blocks of the cache: "]


def requests() -> list[tuple[str, SamplingParams]]:
    return [
        (prompt, SamplingParams(max_tokens=40, structured_outputs=spec, **options))
        for prompt in PROMPTS
        for spec in (*SPECS.values(), None)
        for options in SAMPLING
    ]


def run(llm: LLM) -> list[tuple[list[int], str | None]]:
    prompts, params = zip(*requests(), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(out.outputs[0].token_ids, out.outputs[0].finish_reason) for out in outputs]


@pytest.fixture(scope="module")
def llm(byte_model: str) -> Iterator[LLM]:
    with open_llm(byte_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[list[int], str | None]]:
    """What each request gives by itself."""
    results = []
    for prompt, params in requests():
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        results.append((output.outputs[0].token_ids, output.outputs[0].finish_reason))
    return results


def complete(llm: LLM, spec: Structured | None, **options: Any) -> Any:
    params = SamplingParams(
        **{"temperature": 1.0, "seed": 1, "max_tokens": 40, "structured_outputs": spec, **options}
    )
    (output,) = llm.generate("Some text: ", params, use_tqdm=False)
    return output


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (SPECS["json"], WHOLE),
        (SPECS["regex"], "(ab|é€|x[0-9]{3}){4}!"),
        (SPECS["choice"], "first|second|third"),
        (SPECS["grammar"], r"\(*(日本)?\)*"),
        (Structured(json={"enum": ["😀😀", "é"]}), '"(😀😀|é)"'),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.kind,
)
def test_a_finished_output_matches_and_ends_by_itself(
    llm: LLM, spec: Structured, pattern: str
) -> None:
    """Its tokens are bytes, so this is about parts of characters too."""
    finished = 0
    for seed in range(4):
        out = complete(llm, spec, seed=seed, max_tokens=60).outputs[0]
        if out.finish_reason == "stop":
            finished += 1
            assert re.fullmatch(pattern, out.text, re.DOTALL), out.text
            assert out.token_ids[-1] != 2, "no end token is needed where nothing else may follow"
        else:
            assert len(out.token_ids) == 60
    assert finished > 0


def test_without_masks_outputs_do_not_match(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: what holds the outputs is the masks and nothing else."""
    monkeypatch.setattr(generation, "mask_logits", lambda *_: None)
    output = complete(llm, SPECS["choice"])
    assert output.outputs[0].finish_reason == "error"
    assert "has no place in the grammar" in output.error


def test_an_end_token_ends_what_could_go_on(llm: LLM) -> None:
    spec = Structured(regex="[0-9]+")
    biased = complete(llm, spec, logit_bias={2: 100.0}).outputs[0]
    assert (len(biased.token_ids), biased.token_ids[-1]) == (2, 2)
    assert (len(biased.text), biased.finish_reason) == (1, "stop")
    later = complete(llm, spec, logit_bias={2: 100.0}, min_tokens=6).outputs[0]
    assert (len(later.token_ids), later.finish_reason) == (7, "stop")
    cut = complete(llm, spec, logit_bias={2: -100.0}, max_tokens=5).outputs[0]
    assert (len(cut.text), cut.finish_reason) == (5, "length")
    ignored = complete(llm, spec, logit_bias={2: 100.0}, ignore_eos=True).outputs[0]
    assert (len(ignored.text), ignored.finish_reason) == (1, "stop")


def test_a_document_that_is_complete_ends_before_min_tokens(llm: LLM) -> None:
    out = complete(llm, Structured(choice=["ab"]), min_tokens=10).outputs[0]
    assert (out.text, out.finish_reason) == ("ab", "stop")


def test_a_document_that_is_complete_at_max_tokens_has_stopped(llm: LLM) -> None:
    out = complete(llm, Structured(choice=["abc"]), max_tokens=3).outputs[0]
    assert (out.text, out.finish_reason) == ("abc", "stop")
    out = complete(llm, Structured(choice=["abc"]), max_tokens=2).outputs[0]
    assert (out.text, out.finish_reason) == ("ab", "length")


def test_stop_texts_end_it_early(llm: LLM) -> None:
    out = complete(llm, Structured(choice=["abcdef"]), stop=["cd"]).outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", "cd")


def test_logprobs_are_of_the_model_and_not_of_the_grammar(llm: LLM) -> None:
    out = complete(llm, Structured(choice=["abc"]), logprobs=3).outputs[0]
    assert len(out.logprobs) == 3
    pairs = list(zip(out.token_ids, out.logprobs, strict=True))
    for token_id, entry in pairs:
        assert entry[token_id].logprob > float("-inf")
        assert sorted(item.rank for item in entry.values())[:3] == [1, 2, 3]
    ranks = [entry[token_id].rank for token_id, entry in pairs]
    assert max(ranks) > 3, "the model alone would have said something else"


def test_n_completions_share_one_grammar_and_differ(llm: LLM) -> None:
    output = complete(llm, Structured(regex="[0-9]{12}"), n=6)
    texts = {item.text for item in output.outputs}
    assert all(re.fullmatch("[0-9]{12}", text) for text in texts)
    assert len(texts) > 1


def test_allowed_tokens_and_bad_words_hold_besides(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    few = tokenizer.encode("1379", add_special_tokens=False)
    out = complete(llm, Structured(regex="[0-9]{8}"), allowed_token_ids=few).outputs[0]
    assert set(out.text) <= set("1379")
    assert len(out.text) == 8
    out = complete(llm, Structured(regex="[01]{30}"), bad_words=["1"]).outputs[0]
    assert out.text == "0" * 30
    output = complete(llm, Structured(regex="[0-9]{8}"), allowed_token_ids=[few[0], 99])
    assert output.outputs[0].text == "1" * 8
    output = complete(llm, Structured(regex="[a-f]{8}"), allowed_token_ids=few)
    assert "needs a token that allowed_token_ids forbid" in output.error
    assert output.error_field == "structured_outputs"


def test_the_grammar_begins_when_the_reasoning_ends(llm: LLM) -> None:
    spec = Structured(choice=["answer"], reasoning_end="</think>")
    thinking = complete(llm, spec, logit_bias={4: -100.0}, max_tokens=20).outputs[0]
    assert thinking.finish_reason == "length"
    assert "answer" not in thinking.text
    done = complete(llm, spec, logit_bias={4: 6.0}, max_tokens=60).outputs[0]
    assert done.finish_reason == "stop"
    index = done.token_ids.index(4)
    tail = llm.get_tokenizer().decode(done.token_ids[index + 1 :])
    assert (tail, index > 0) == ("answer", True)
    spelled = Structured(choice=["answer"], reasoning_end="ab")  # a marker of several tokens
    bias = dict.fromkeys(llm.get_tokenizer().encode("ab", add_special_tokens=False), 9.0)
    text = complete(llm, spelled, logit_bias=bias, max_tokens=60).outputs[0].text
    assert text.endswith("abanswer")


def test_reasoning_that_no_token_begins_is_begun_for_the_model(llm: LLM) -> None:
    spec = Structured(choice=["answer"], reasoning_start="So: ", reasoning_end=["</x>", "7", "8"])
    for seed in range(3):
        out = complete(llm, spec, seed=seed, max_tokens=100).outputs[0]
        assert out.text.startswith("So: ")
        if out.finish_reason == "stop":
            assert re.fullmatch("So: .*[78]answer", out.text, re.DOTALL)
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=100, structured_outputs=spec)
        request = prepare_replay(llm, "Some text: ", params, out.token_ids[:3])
        (replayed,) = llm._run([request], use_tqdm=False)
        assert replayed.outputs[0].token_ids == out.token_ids


def test_together_as_alone(llm: LLM, alone: list[Any]) -> None:
    assert run(llm) == alone
    assert len({tuple(tokens) for tokens, _ in alone}) > 20
    assert {reason for _, reason in alone} == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5},
        {"async_scheduling": True},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 12, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 12, "max_num_seqs": 8, "async_scheduling": True},
    ],
    ids=["in chunks", "steps in flight", "no prefix cache", "preempted", "preempted in flight"],
)
def test_the_same_tokens_whatever_the_engine_does(
    byte_model: str, alone: list[Any], options: dict[str, Any]
) -> None:
    with open_llm(byte_model, **options) as llm:
        assert run(llm) == alone
        if "num_gpu_blocks_override" in options:
            assert llm.engine.stats().num_preemptions > 0
        assert llm.engine.stats().kv_cache_usage == 0.0
        assert not llm.engine.grammars._outputs


@pytest.mark.slow
def test_the_same_tokens_on_two_ranks(byte_model: str, alone: list[Any]) -> None:
    with open_llm(byte_model, tensor_parallel_size=2) as llm:
        assert run(llm) == alone


def test_a_replay_goes_on_as_the_original(llm: LLM) -> None:
    for spec in SPECS.values():
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, structured_outputs=spec)
        (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        tokens = whole.outputs[0].token_ids
        for cut in (1, len(tokens) // 2, len(tokens) - 1):
            request = prepare_replay(llm, PROMPTS[0], params, tokens[:cut])
            (replayed,) = llm._run([request], use_tqdm=False)
            assert replayed.outputs[0].token_ids == tokens
            assert replayed.outputs[0].finish_reason == whole.outputs[0].finish_reason


def test_a_replay_of_a_complete_document_ends(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs=Structured(choice=["abc"]))
    done = llm.get_tokenizer().encode("abc", add_special_tokens=False)
    request = prepare_replay(llm, "x", params, done)
    (output,) = llm._run([request], use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_tokens_with_drafts(byte_model: str, alone: list[Any], overlap: bool) -> None:
    oracle = Oracle([tokens for tokens, _ in alone], wrong=100)
    with open_llm(byte_model, drafter=oracle, async_scheduling=overlap) as llm:
        assert run(llm) == alone
    assert oracle.num_accepted > 100


def test_with_a_draft_model_that_knows_no_grammar(
    byte_model: str, alone: list[tuple[list[int], str | None]]
) -> None:
    settings = {"method": "draft_model", "model": byte_model, "num_speculative_tokens": 4}
    with open_llm(byte_model, speculative_config=settings) as llm:
        assert run(llm) == alone


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "ngram", "prompt_lookup_min": 4},  # often without a match
        {"method": "suffix"},
        {"method": "custom", "model": "drafters:AtRandom"},
    ],
    ids=["ngram", "ngram of few", "suffix", "random"],
)
def test_the_same_tokens_with_speculation(
    byte_model: str, alone: list[Any], config: dict[str, Any], overlap: bool
) -> None:
    options = {"speculative_config": {**config, "adaptive": False}, "async_scheduling": overlap}
    with open_llm(byte_model, **options) as llm:
        assert run(llm) == alone
        assert run(llm) == alone


def test_the_other_backend_holds_outputs_too(byte_model: str) -> None:
    with open_llm(byte_model, structured_outputs_backend="xgrammar") as llm:
        matched = 0
        for spec, pattern in ((SPECS["json"], WHOLE), (SPECS["choice"], "first|second|third")):
            for seed in range(3):
                out = complete(llm, spec, seed=seed, max_tokens=60).outputs[0]
                if out.finish_reason == "stop":
                    matched += 1
                    assert re.fullmatch(pattern, out.text, re.DOTALL), out.text
        assert matched > 3
        assert "cannot be used" in complete(llm, Structured(regex="(")).error


def test_a_request_that_waits_for_its_grammar_holds_up_nobody(byte_model: str) -> None:
    with open_llm(byte_model) as llm:
        slow = SamplingParams(max_tokens=4, structured_outputs=SPECS["json"])
        fast = SamplingParams(max_tokens=4, temperature=0.0)
        requests = [
            llm.frontend.prepare("slow", "x", slow),
            llm.frontend.prepare("fast", "x", fast),
        ]
        llm._submit(requests)
        finished: list[str] = []
        while len(finished) < 2:
            finished += [r.request_id for r in llm._step() if r.assembler.finished]
        assert finished == ["fast", "slow"]  # the first one starts a process, and more


def test_a_grammar_that_fails_on_the_way_fails_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.structured.llguidance_backend import GuidanceMatcher

    class Tired(GuidanceMatcher):
        num_left = 4

        @property
        def error(self) -> str | None:
            Tired.num_left -= 1
            return "too many states" if Tired.num_left <= 0 else None

    plain = complete(llm, SPECS["choice"]).outputs[0].text
    grammar_class = "penstock.structured.llguidance_backend.GuidanceMatcher"
    monkeypatch.setattr(grammar_class, Tired)
    output = complete(llm, Structured(regex="[0-9]{20}"))
    assert output.error == "structured_outputs failed: too many states"
    monkeypatch.undo()
    assert complete(llm, SPECS["choice"]).outputs[0].text == plain


@pytest.mark.parametrize("method", ["start_masks", "masks"])
def test_an_interrupt_while_masks_are_filled_leaves_the_engine_usable(
    byte_model: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with open_llm(byte_model, async_scheduling=True) as llm:
        original = getattr(llm.engine.grammars, method)
        calls: list[str] = []

        def interrupted(*args: Any) -> Any:
            calls.append(method)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return original(*args)

        monkeypatch.setattr(llm.engine.grammars, method, interrupted)
        # Alone, so that its first step has nothing in flight before it, and its second has.
        with pytest.raises(KeyboardInterrupt):
            complete(llm, SPECS["json"])
        assert not llm.engine.has_work()
        assert llm.engine.stats().num_steps_in_flight == 0
        assert llm.engine.stats().kv_cache_usage == 0.0
        assert run(llm) == alone


def test_a_grammar_that_leads_nowhere_is_the_clients_fault(llm: LLM) -> None:
    endless = {"$ref": "#/$defs/a"}
    schema = {
        "type": "object",
        "properties": {"name": {"const": "x"}, "more": endless},
        "required": ["name", "more"],
        "$defs": {"a": endless},
    }
    for spec in (
        Structured(json=schema, field="response_format", disable_any_whitespace=True),
        Structured(structural_tag=tag_of(endless), field="response_format"),
    ):
        output = complete(llm, spec)
        assert output.error_field == "response_format"
        assert re.match("response_format .*no text matches it", output.error)


def tag_of(schema: Any) -> Any:
    after = {"type": "json_schema", "json_schema": {**schema, "$defs": {"a": schema}}}
    begun = {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, after]}
    return {"type": "structural_tag", "format": begun}


def test_a_request_without_a_tokenizer_is_refused(byte_model: str) -> None:
    with open_llm(byte_model, skip_tokenizer_init=True) as llm:
        params = SamplingParams(structured_outputs=SPECS["choice"])
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
        assert "needs a tokenizer" in output.error
        assert output.error_field == "structured_outputs"
