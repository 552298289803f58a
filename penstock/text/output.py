"""Turns engine deltas into a user's output: one `OutputAssembler` per request.

A request with n completions runs as n children in the engine. The assembler detokenizes each, finds
stop strings, and returns outputs as the request's `output_kind` says.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import InputError
from penstock.protocol.outputs import (
    CompletionOutput,
    DraftCounts,
    Logprob,
    LogprobsAtPosition,
    RequestOutput,
    RequestStateStats,
)
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.protocol.step import PromptLogprobs, RoutedExperts, TokenLogprobs
from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import StopScanner, StopStrings
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class OutputAssembler:
    """Collects the deltas of a request's children and returns `RequestOutput`s.

    `shown_tokens` appear in the text even if they are special.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        child_ids: Sequence[str],
        shown_tokens: Collection[str] = (),
    ) -> None:
        if params.stop_strings and tokenizer is None:
            raise InputError("stop needs a tokenizer: stop strings are matched in text", "stop")
        self.request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = list(prompt_token_ids)
        self._kind = params.output_kind
        self._tokenizer = tokenizer
        self._stats = RequestStateStats(arrival_time=time.time(), queued_ts=time.monotonic())
        self._num_cached_tokens = 0
        self._error: str | None = None
        self._error_field: str | None = None
        self._can_retry = False
        self._stopped: list[str] = []
        self._prompt_logprobs = (
            _PromptLogprobs(len(prompt_token_ids)) if params.prompt_logprobs is not None else None
        )
        stops = StopStrings(params.stop_strings) if params.stop_strings else None
        self._children = {
            child_id: _Child(
                index=index,
                num_prompt_tokens=len(prompt_token_ids),
                params=params,
                tokenizer=tokenizer,
                detokenizer=(
                    tokenizer.detokenizer(
                        prompt_token_ids, params.skip_special_tokens, shown_tokens
                    )
                    if tokenizer is not None and params.detokenize
                    else None
                ),
                scanner=StopScanner(stops, params.include_stop_str_in_output) if stops else None,
            )
            for index, child_id in enumerate(child_ids)
        }
        self._num_unfinished = len(self._children)

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def add(self, delta: EngineDelta) -> None:
        """Process a delta of one child. Ignored if the child is finished."""
        child = self._children[delta.request_id]
        if child.finished:
            return
        if child.index == 0:  # other children may hit the cache that the first one filled
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs.place(delta.prompt_logprobs, self._tokenizer)
        if delta.token_ids:
            self._stats.add_tokens(len(delta.token_ids), time.monotonic(), delta.prefill_s)
        child.add(delta)
        if child.finished:
            self._num_unfinished -= 1
            if delta.finish_reason is None:
                self._stopped.append(delta.request_id)
        if delta.error is not None and self._error is None:
            self._error, self._error_field = delta.error, delta.error_field
            self._can_retry = delta.can_retry

    def stopped_children(self) -> list[str]:
        """Children that a stop string ended while the engine continues. Each is returned once."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def take(self) -> RequestOutput | None:
        """The output to show now, or None."""
        changed = [child for child in self._children.values() if child.changed]
        finished, delta_only = self.finished, self._kind is OutputKind.DELTA
        if not changed or (self._kind is OutputKind.FINAL_ONLY and not finished):
            return None
        prompt_logprobs = None
        if self._prompt_logprobs is not None:
            if self._prompt_logprobs.is_awaited and self._error is None and not finished:
                return None  # another child may be faster, by cached blocks: the prompt comes first
            prompt_logprobs = self._prompt_logprobs.show(finished, once=delta_only)
        completions = (
            [child.take_delta() for child in changed]
            if delta_only
            else [child.take_everything() for child in self._children.values()]
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._stats,
            error=self._error,
            error_field=self._error_field,
            can_retry=self._can_retry,
        )


@dataclass(slots=True)
class _Child:
    """One growing completion. The `shown_*` fields say how much of it deltas have shown."""

    index: int
    num_prompt_tokens: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    detokenizer: Detokenizer | None
    scanner: StopScanner | None
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobsAtPosition] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    routed_experts: _RoutedExperts | None = None
    drafts: DraftCounts | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    shown_tokens: int = 0
    shown_texts: int = 0
    shown_logprobs: int = 0
    changed: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: EngineDelta) -> None:
        if delta.routed_experts is not None:
            if self.routed_experts is None:
                self.routed_experts = _RoutedExperts()
            self.routed_experts.place(delta.routed_experts)
        if delta.num_drafts and delta.token_ids:
            self.drafts = self.drafts or DraftCounts()
            self.drafts.add(delta.num_drafts, len(delta.token_ids) - 1)
        if delta.finish_reason is None and delta.error is None:
            self.changed = self.changed or bool(delta.token_ids)
            self.add_tokens(delta.token_ids, delta.logprobs)
            return
        self.changed = True
        ends_with_stop_token = (
            delta.finish_reason is FinishReason.STOP
            and not delta.ends_in_text
            and bool(delta.token_ids)
            and not self.params.include_stop_str_in_output
        )
        self.add_tokens(delta.token_ids, delta.logprobs, hide_last=ends_with_stop_token)
        if self.finished:
            return
        self._flush()
        if not self.finished:
            self.finish_reason = (delta.finish_reason or FinishReason.ERROR).value
            self.stop_reason = delta.stop_reason

    def add_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], hide_last: bool = False
    ) -> None:
        """Process tokens up to the one that completes a stop string, if any.

        With `hide_last`, the last token, a stop token, adds no text.
        """
        num_shown = len(token_ids) - hide_last
        if self.scanner is None:
            self.token_ids.extend(token_ids)
            if self.detokenizer is not None:
                self._add_text(self.detokenizer.add(token_ids[:num_shown]))
        else:
            assert self.detokenizer is not None
            for position, token_id in enumerate(token_ids):
                self.token_ids.append(token_id)
                if position < num_shown:
                    self._scan(self.detokenizer.add([token_id]))
                if self.finished:
                    logprobs = logprobs[: position + 1]
                    break
        for entry in logprobs if self.params.wants_logprobs else ():
            self.cumulative_logprob += entry.logprobs[0]
            is_ranked = not self.params.logprob_token_ids
            self.logprobs.append(_by_token(entry, self.tokenizer, is_ranked))

    def _scan(self, text: str) -> None:
        assert self.scanner is not None
        self._add_text(
            self.scanner.feed(text, may_stop=len(self.token_ids) > self.params.min_tokens)
        )
        if self.scanner.matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, self.scanner.matched

    def _flush(self) -> None:
        held = self.detokenizer.flush() if self.detokenizer is not None else ""
        if self.scanner is None:
            self._add_text(held)
            return
        self._scan(held)
        if not self.finished:
            self._add_text(self.scanner.flush())

    def _add_text(self, text: str) -> None:
        if text:
            self.texts.append(text)

    def mark_delivered(self) -> None:
        self.shown_tokens = len(self.token_ids)
        self.shown_texts = len(self.texts)
        self.shown_logprobs = len(self.logprobs)
        self.changed = False

    def take_everything(self) -> CompletionOutput:
        self.changed = False
        self.texts = ["".join(self.texts)]
        return self._output(self.texts[0], list(self.token_ids), list(self.logprobs))

    def take_delta(self) -> CompletionOutput:
        output = self._output(
            "".join(self.texts[self.shown_texts :]),
            self.token_ids[self.shown_tokens :],
            self.logprobs[self.shown_logprobs :],
        )
        self.mark_delivered()
        return output

    def _output(
        self, text: str, token_ids: list[int], logprobs: list[LogprobsAtPosition]
    ) -> CompletionOutput:
        wants_logprobs = self.params.wants_logprobs
        routed_experts = None
        if self.routed_experts is not None and self.finished:
            # The last token was sampled, but never computed.
            count = self.num_prompt_tokens + len(self.token_ids) - 1
            routed_experts = self.routed_experts.of_first(count)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=logprobs if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            routed_experts=routed_experts,
            drafts=self.drafts,
        )


class _RoutedExperts:
    """The experts of a request's tokens, by position. Repeated positions are overwritten."""

    def __init__(self) -> None:
        self._ids = bytearray()  # int16 [tokens, layers, top_k]
        self._shape = (0, 0)

    def place(self, piece: RoutedExperts) -> None:
        self._shape = (piece.num_layers, piece.top_k)
        start = piece.start * 2 * piece.num_layers * piece.top_k
        self._ids[start : start + len(piece.ids)] = piece.ids

    def of_first(self, num_tokens: int) -> npt.NDArray[np.int16]:
        """[tokens, layers, top_k]"""
        import numpy as np  # only if requested

        return np.frombuffer(bytes(self._ids), np.int16).reshape(-1, *self._shape)[:num_tokens]


class _PromptLogprobs:
    """The prompt's logprobs by position. Pieces may come from any child, and repeatedly."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._by_position: list[LogprobsAtPosition | None] = [None] * num_prompt_tokens
        self._num_missing = max(num_prompt_tokens - 1, 0)  # the first token has none
        self._shown = False

    def place(self, piece: PromptLogprobs, tokenizer: Tokenizer | None) -> None:
        for position, entry in enumerate(piece.positions, start=piece.start):
            if self._by_position[position] is None:
                self._num_missing -= 1
                self._by_position[position] = _by_token(entry, tokenizer)

    @property
    def is_awaited(self) -> bool:
        return self._num_missing > 0

    def show(self, finished: bool, once: bool) -> list[LogprobsAtPosition | None] | None:
        """All of them once complete, or the available ones when the request is finished."""
        nothing_came = self._num_missing and not any(self._by_position)
        if nothing_came or (self._num_missing and not finished):
            return None
        if once and self._shown:
            return None
        self._shown = True
        return list(self._by_position)


def _by_token(
    entry: TokenLogprobs, tokenizer: Tokenizer | None, is_ranked: bool = True
) -> LogprobsAtPosition:
    """The chosen token first, then the top tokens in order if `is_ranked`."""
    by_token: LogprobsAtPosition = {}
    pairs = zip(entry.token_ids, entry.logprobs, strict=True)
    for place, (token_id, logprob) in enumerate(pairs):
        if token_id not in by_token:
            text = tokenizer.token_text(token_id) if tokenizer is not None else None
            rank = place if is_ranked else None
            by_token[token_id] = Logprob(logprob, entry.rank if place == 0 else rank, text)
    return by_token
