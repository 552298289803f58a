"""What users see of a request, for every output kind, from any cut of the engine's deltas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_backend, sentencepiece_like_backend

from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import InputError
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.protocol.step import PromptLogprobs, TokenLogprobs
from penstock.text.output import OutputAssembler
from penstock.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level_backend())
EOS = 1


def ids(text: str) -> list[int]:
    """One token for each byte, so that a test can count."""
    return [2 + byte for byte in text.encode()]


def assembler(
    params: SamplingParams | None = None, children: list[str] | None = None, **options: Any
) -> OutputAssembler:
    given = {
        "request_id": "r",
        "prompt": "the",
        "prompt_token_ids": TOKENIZER.encode("the"),
        "params": params or SamplingParams(),
        "tokenizer": TOKENIZER,
        "child_ids": children or ["r"],
        **options,
    }
    return OutputAssembler(**given)


def delta(token_ids: list[int], child: str = "r", **fields: Any) -> EngineDelta:
    return EngineDelta(request_id=child, token_ids=token_ids, **fields)


def take(out: OutputAssembler) -> RequestOutput:
    output = out.take()
    assert output is not None
    return output


def logprobs(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs([i, 7, i], [-1.0, -0.25, -1.0], 2) for i in token_ids]


def test_cumulative_outputs_hold_everything_so_far() -> None:
    out = assembler()
    out.add(delta(ids("ab")))
    assert take(out).outputs[0].text == "ab"
    assert out.take() is None
    out.add(delta(ids("c"), finish_reason=FinishReason.LENGTH))
    output = take(out)
    assert output.finished
    assert output.prompt == "the"
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].token_ids == ids("abc")
    assert output.outputs[0].finish_reason == "length"
    assert out.take() is None


def test_delta_outputs_hold_only_what_is_new() -> None:
    out = assembler(SamplingParams(output_kind=OutputKind.DELTA, logprobs=1))
    out.add(delta(ids("ab"), logprobs=logprobs(ids("ab"))))
    first = take(out).outputs[0]
    out.add(delta(ids("c"), logprobs=logprobs(ids("c")), finish_reason=FinishReason.LENGTH))
    second = take(out).outputs[0]
    assert (first.text, second.text) == ("ab", "c")
    assert (first.token_ids, second.token_ids) == (ids("ab"), ids("c"))
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert (len(first.logprobs), len(second.logprobs)) == (2, 1)
    assert second.cumulative_logprob == -3.0


def test_final_only_shows_one_output_when_all_is_done() -> None:
    out = assembler(SamplingParams(output_kind=OutputKind.FINAL_ONLY))
    out.add(delta(ids("ab")))
    assert out.take() is None
    out.add(delta(ids("c"), finish_reason=FinishReason.LENGTH))
    assert take(out).outputs[0].text == "abc"
    assert out.take() is None


def test_half_a_character_waits_and_is_replaced_at_the_end() -> None:
    first, second, _ = ids("€")
    out = assembler(SamplingParams(output_kind=OutputKind.DELTA))
    out.add(delta([first, second]))
    assert take(out).outputs[0].text == ""
    out.add(delta([], finish_reason=FinishReason.LENGTH))
    assert take(out).outputs[0].text == "\ufffd"


def test_the_end_of_text_token_is_kept_but_not_shown() -> None:
    for skip in (True, False):
        out = assembler(SamplingParams(skip_special_tokens=skip))
        out.add(delta([*ids("ab"), EOS], finish_reason=FinishReason.STOP))
        completion = take(out).outputs[0]
        assert completion.text == "ab"
        assert completion.token_ids == [*ids("ab"), EOS]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_token_is_shown_where_stops_are_to_be_included() -> None:
    for include, text in ((False, "a"), (True, "ab")):
        out = assembler(SamplingParams(include_stop_str_in_output=include))
        stop = ids("b")[0]
        out.add(delta(ids("ab"), finish_reason=FinishReason.STOP, stop_reason=stop))
        assert take(out).outputs[0].text == text
        assert out.stopped_children() == []


def test_a_stop_string_ends_the_child_here_and_asks_for_its_abort() -> None:
    out = assembler(SamplingParams(stop=["END"], logprobs=1))
    tokens = ids("one END two")
    out.add(delta(tokens, logprobs=logprobs(tokens)))
    assert out.finished
    assert out.stopped_children() == ["r"]
    assert out.stopped_children() == []
    completion = take(out).outputs[0]
    assert completion.text == "one "
    assert completion.token_ids == ids("one END")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(ids("one END"))
    assert completion.cumulative_logprob == -7.0
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    out.add(delta(ids("late"), finish_reason=FinishReason.ABORT))
    assert out.take() is None


def test_a_child_that_the_engine_ended_anyway_needs_no_abort() -> None:
    out = assembler(SamplingParams(stop="END"))
    out.add(delta(ids("x END yz"), finish_reason=FinishReason.LENGTH))
    assert out.stopped_children() == []
    assert take(out).outputs[0].finish_reason == "stop"


def test_text_that_might_become_a_stop_string_is_held_back_and_given_at_the_end() -> None:
    out = assembler(SamplingParams(stop="END", output_kind=OutputKind.DELTA))
    out.add(delta(ids("x EN")))
    assert take(out).outputs[0].text == "x "
    out.add(delta([EOS], finish_reason=FinishReason.STOP))
    assert take(out).outputs[0].text == "EN"


def test_no_stop_string_counts_within_min_tokens() -> None:
    out = assembler(SamplingParams(stop="b", min_tokens=2))
    out.add(delta(ids("abcb")))
    assert take(out).outputs[0].text == "abc"
    assert out.finished


def test_children_are_told_apart_and_the_request_ends_with_the_last() -> None:
    out = assembler(SamplingParams(n=2, output_kind=OutputKind.DELTA), ["r#0", "r#1"])
    out.add(delta(ids("b"), "r#1", finish_reason=FinishReason.LENGTH))
    output = take(out)
    assert not output.finished
    assert [(c.index, c.text) for c in output.outputs] == [(1, "b")]
    out.add(delta(ids("a"), "r#0", finish_reason=FinishReason.LENGTH))
    output = take(out)
    assert output.finished
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a")]


def test_cumulative_outputs_list_every_child() -> None:
    out = assembler(SamplingParams(n=2), ["r#0", "r#1"])
    out.add(delta(ids("b"), "r#1"))
    assert [c.text for c in take(out).outputs] == ["", "b"]


def test_an_error_ends_its_child_alone() -> None:
    out = assembler(SamplingParams(n=2), ["r#0", "r#1"])
    out.add(delta([], "r#0", finish_reason=FinishReason.ERROR, error="it broke"))
    output = take(out)
    assert output.error == "it broke"
    assert [c.finish_reason for c in output.outputs] == ["error", None]
    out.add(delta(ids("b"), "r#1", finish_reason=FinishReason.LENGTH))
    output = take(out)
    assert output.finished
    assert output.error == "it broke"


def test_logprobs_name_the_chosen_token_first_with_its_rank_and_text() -> None:
    out = assembler(SamplingParams(logprobs=2))
    chosen = ids("a")[0]
    entry = TokenLogprobs([chosen, 70, chosen, 80], [-1.5, -0.5, -1.5, -3.0], 2)
    out.add(delta([chosen], logprobs=[entry]))
    completion = take(out).outputs[0]
    assert completion.logprobs is not None
    (at_first,) = completion.logprobs
    assert list(at_first) == [chosen, 70, 80]
    assert [(x.logprob, x.rank) for x in at_first.values()] == [(-1.5, 2), (-0.5, 1), (-3.0, 3)]
    assert at_first[chosen].decoded_token == "a"
    assert completion.cumulative_logprob == -1.5


def test_logprobs_are_absent_unless_asked_for() -> None:
    out = assembler()
    out.add(delta(ids("a")))
    completion = take(out).outputs[0]
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


@pytest.mark.parametrize("kind", list(OutputKind))
def test_prompt_logprobs_are_placed_by_position_even_if_repeated(kind: OutputKind) -> None:
    prompt = ids("abcd")
    params = SamplingParams(prompt_logprobs=1, output_kind=kind)
    out = assembler(params, prompt_token_ids=prompt)
    pieces = [
        PromptLogprobs(1, logprobs(prompt[1:3])),
        PromptLogprobs(1, logprobs(prompt[1:3])),
        PromptLogprobs(3, logprobs(prompt[3:])),
    ]
    for piece in pieces:
        out.add(delta([], prompt_logprobs=piece))
        assert out.take() is None
    out.add(delta(ids("x"), finish_reason=FinishReason.LENGTH))
    at = take(out).prompt_logprobs
    assert at is not None
    assert at[0] is None
    assert [next(iter(entry)) for entry in at[1:] if entry] == prompt[1:]


def test_deltas_carry_the_prompts_logprobs_once() -> None:
    params = SamplingParams(prompt_logprobs=0, output_kind=OutputKind.DELTA)
    out = assembler(params, prompt_token_ids=ids("ab"))
    out.add(delta(ids("x"), prompt_logprobs=PromptLogprobs(1, logprobs(ids("b")))))
    assert take(out).prompt_logprobs is not None
    out.add(delta(ids("y")))
    assert take(out).prompt_logprobs is None


def test_a_faster_completion_waits_for_the_prompts_logprobs() -> None:
    params = SamplingParams(n=2, prompt_logprobs=0, output_kind=OutputKind.DELTA)
    out = assembler(params, ["r#0", "r#1"], prompt_token_ids=ids("ab"))
    out.add(delta(ids("x"), "r#1"))
    assert out.take() is None
    piece = PromptLogprobs(1, logprobs(ids("b")))
    out.add(delta(ids("y"), "r#0", prompt_logprobs=piece))
    output = take(out)
    assert output.prompt_logprobs is not None
    assert [item.text for item in output.outputs] == ["y", "x"]


def test_cached_prompt_tokens_are_reported() -> None:
    out = assembler()
    out.add(delta([], num_cached_tokens=3))
    out.add(delta(ids("x")))
    assert take(out).num_cached_tokens == 3


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    out = assembler(SamplingParams(logprobs=0), tokenizer=None, prompt=None)
    out.add(delta([5], logprobs=[TokenLogprobs([5], [-1.0], 1)]))
    completion = take(out).outputs[0]
    assert (completion.text, completion.token_ids) == ("", [5])
    assert completion.logprobs is not None
    assert completion.logprobs[0][5].decoded_token is None
    with pytest.raises(InputError, match="stop"):
        assembler(SamplingParams(stop="x"), tokenizer=None)


def test_detokenize_off_leaves_the_text_empty() -> None:
    out = assembler(SamplingParams(detokenize=False))
    out.add(delta(ids("ab")))
    assert take(out).outputs[0].text == ""


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = Tokenizer(sentencepiece_like_backend())
    out = assembler(tokenizer=tokenizer, prompt_token_ids=tokenizer.encode("the"))
    out.add(delta(tokenizer.encode("cat")))
    assert take(out).outputs[0].text == " cat"


# However the engine cuts its deltas ------------------------------------------------------------

token_lists = st.lists(
    st.one_of(st.sampled_from(ids("ab ")), st.integers(0, TOKENIZER.vocab_size - 1)), max_size=16
)
params_strategy = st.builds(
    SamplingParams,
    stop=st.one_of(
        st.none(), st.lists(st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=3)
    ),
    min_tokens=st.integers(0, 5),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    logprobs=st.just(1),
    output_kind=st.sampled_from(OutputKind),
)


def final(out: OutputAssembler, chunks: list[list[int]], kind: OutputKind) -> Any:
    """Text, tokens, logprobs and reasons, however many outputs they came in."""
    outputs = []
    for chunk in [*chunks, None]:
        end = FinishReason.LENGTH if chunk is None else None
        out.add(delta(chunk or [], logprobs=logprobs(chunk or []), finish_reason=end))
        if (output := out.take()) is not None:
            outputs.append(output.outputs[0])
    last = outputs[-1]
    if kind is not OutputKind.DELTA:
        outputs = [last]
    text = "".join(o.text for o in outputs)
    tokens = [i for o in outputs for i in o.token_ids]
    entries = [entry for o in outputs for entry in o.logprobs or []]
    return text, tokens, entries, last.finish_reason, last.stop_reason


@given(token_lists, params_strategy, st.data())
def test_the_result_does_not_depend_on_how_deltas_are_cut(
    tokens: list[int], params: SamplingParams, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    chunks = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    kind = params.output_kind
    pieces = final(assembler(params), chunks, kind)
    params.output_kind = OutputKind.FINAL_ONLY
    assert pieces == final(assembler(params), [[i] for i in tokens], OutputKind.FINAL_ONLY)


def test_nothing_is_kept_of_a_prompt_whose_logprobs_nobody_wants() -> None:
    assert assembler()._prompt_logprobs is None
    assert assembler(SamplingParams(prompt_logprobs=0))._prompt_logprobs is not None
