"""TurnReader: parses a turn's outputs into text, reasoning and tool calls, and counts its usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.conversation.grammar import after_reasoning, hold_to_calls, hold_to_format
from penstock.conversation.request import NamedTool, TurnRequest
from penstock.protocol.outputs import (
    CompletionOutput,
    DraftCounts,
    LogprobsAtPosition,
    Message,
    RequestOutput,
)
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.text.frontend import Frontend
from penstock.text.parsing.deltas import (
    ContentDelta,
    Delta,
    Part,
    ReasoningDelta,
    ToolCallBroken,
    ToolCallStart,
    message_of,
    parts_of,
)
from penstock.text.parsing.parser import OutputParser, ParserContext, make_output_parser

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(slots=True)
class TurnStep:
    """New output of one of the `n` choices. `deltas` are in the order of the text.

    With `finish_reason` the choice is finished. A `ToolCallBroken` delta revokes a call: its text
    belongs to the content. A call without a `ToolCallEnd` was cut off.
    """

    index: int
    deltas: list[Delta]
    token_ids: list[int]
    logprobs: list[LogprobsAtPosition] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    routed_experts: npt.NDArray[np.int16] | None = None
    drafts: DraftCounts | None = None  # so far


@dataclass(frozen=True)
class TurnAnswer:
    """One complete choice."""

    index: int
    parts: list[Part]  # in the order of the text
    token_ids: list[int]
    logprobs: list[LogprobsAtPosition] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    routed_experts: npt.NDArray[np.int16] | None = None
    drafts: DraftCounts | None = None  # so far

    @property
    def message(self) -> Message:
        return message_of(self.parts)


@dataclass
class TurnUsage:
    """Tokens of all choices. `num_cached` counts prompt tokens from the prefix cache, `num_image`
    and `num_video` the placeholders among the prompt tokens."""

    num_prompt: int = 0
    num_cached: int = 0
    num_image: int = 0
    num_video: int = 0
    num_completion: int = 0
    num_reasoning: int = 0

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_completion

    def add(self, other: TurnUsage) -> None:
        self.num_prompt += other.num_prompt
        self.num_cached += other.num_cached
        self.num_image += other.num_image
        self.num_video += other.num_video
        self.num_completion += other.num_completion
        self.num_reasoning += other.num_reasoning


class TurnReader:
    """Parses a turn's outputs as they arrive and counts their tokens.

    `prompt_logprobs` are known from the first step on.
    """

    def __init__(self, parsing: Parsing, num_choices: int, request: EngineRequest) -> None:
        self._choices = [_ChoiceParser(index, parsing) for index in range(num_choices)]
        self.prompt_logprobs: list[LogprobsAtPosition | None] | None = None
        num_rows = Counter[str]()
        for item in request.media:
            num_rows[item.modality] += item.num_rows
        self.usage = TurnUsage(
            num_prompt=len(request.prompt_token_ids),
            num_image=num_rows["image"],
            num_video=num_rows["video"],
        )

    def steps(self, output: RequestOutput) -> Iterator[TurnStep]:
        """Yield a step for each choice in `output`, and count it in `usage`."""
        for item in output.outputs:
            step = self._choices[item.index].take(item)
            self._count(output, item)
            yield step

    def _count(self, output: RequestOutput, item: CompletionOutput) -> None:
        self.usage.num_cached = output.num_cached_tokens
        self.usage.num_completion += len(item.token_ids)
        self.usage.num_reasoning += self._choices[item.index].num_new_reasoning_tokens()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


def join_steps(steps: Sequence[TurnStep]) -> TurnAnswer:
    """Join all steps of one choice."""
    last = steps[-1]
    assert last.finish_reason is not None, "a choice ends with a reason"
    logprobs = None
    if last.logprobs is not None:
        logprobs = [entry for step in steps for entry in step.logprobs or ()]
    return TurnAnswer(
        index=last.index,
        parts=parts_of(delta for step in steps for delta in step.deltas),
        token_ids=[token_id for step in steps for token_id in step.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        routed_experts=last.routed_experts,
        drafts=last.drafts,
    )


class Parsing:
    """How the outputs of one turn are parsed and constrained."""

    def __init__(self, frontend: Frontend, request: TurnRequest, context: ParserContext) -> None:
        self._frontend = frontend
        self._context = context
        choice = request.tool_choice
        # As in OpenAI's API, a named tool is called exactly once.
        self.allows_several_calls = request.parallel_tool_calls and not isinstance(
            choice, NamedTool
        )
        self._enforced = bool(request.tools) and choice not in ("none", "auto")
        self._tools = [] if choice == "none" else list(request.tools)
        if isinstance(choice, NamedTool):
            self._tools = [tool for tool in request.tools if tool.name == choice.name]
        self._is_free = request.params.structured_outputs is None
        # Without the model's own parser, enforced calls are plain JSON.
        self._tool_parser = frontend.parsers.tools or ("json" if self._enforced else None)

    def make_parser(self) -> OutputParser:
        return make_output_parser(
            self._frontend.parsers.reasoning,
            self._tool_parser,
            tools_offered=self._tools,
            context=self._context,
            enforced=self._enforced,
            is_free=self._is_free,
        )

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Return the params with the grammar for the tool choice and the answer's format."""
        renderer = self._frontend.renderer
        tokenizer, source = self._frontend.tokenizer, renderer.source if renderer else ""
        if tokenizer is None:
            return params
        reasoning = self._frontend.parsers.reasoning
        wanted = params.structured_outputs
        if self._enforced:
            assert self._tool_parser is not None
            wanted = hold_to_calls(
                self._tool_parser, self._tools, self.allows_several_calls, source, tokenizer
            )
        elif wanted is not None and self._tools and self._tool_parser is not None:
            wanted = hold_to_format(
                wanted,
                self._tool_parser,
                self._tools,
                self.allows_several_calls,
                source,
                tokenizer,
            )
        if wanted is not None:
            wanted = after_reasoning(
                wanted, reasoning, self._context, tokenizer, source, self._enforced
            )
        return msgspec.structs.replace(params, structured_outputs=wanted)


class _ChoiceParser:
    """Parses the output of one choice."""

    def __init__(self, index: int, parsing: Parsing) -> None:
        self.parser = parsing.make_parser()
        self._index = index
        self._allows_several = parsing.allows_several_calls
        self._calls: set[int] = set()
        self._only: int | None = None  # the only call to keep, without parallel calls
        self._num_reasoning_tokens = 0

    def take(self, item: CompletionOutput) -> TurnStep:
        deltas = self.parser.feed(item.text, item.token_ids)
        if item.finish_reason is not None:
            deltas += self.parser.finish(is_whole=item.finish_reason == "stop")
        if not self._allows_several:
            deltas = list(self._first_call_alone(deltas))
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                self._calls.add(delta.index)
            elif isinstance(delta, ToolCallBroken):
                self._calls.discard(delta.index)
        reason: Any = item.finish_reason
        if reason == "stop" and self._calls:
            reason = "tool_calls"
        return TurnStep(
            index=self._index,
            deltas=deltas,
            token_ids=item.token_ids,
            logprobs=item.logprobs,
            finish_reason=reason,
            stop_reason=item.stop_reason,
            routed_experts=item.routed_experts,
            drafts=item.drafts,
        )

    def num_new_reasoning_tokens(self) -> int:
        """The change since the last call. It can be negative."""
        before, self._num_reasoning_tokens = (
            self._num_reasoning_tokens, self.parser.num_reasoning_tokens
        )  # fmt: skip
        return self._num_reasoning_tokens - before

    def _first_call_alone(self, deltas: list[Delta]) -> Iterator[Delta]:
        """Drop calls after the first. If the first is revoked, the next call takes its place."""
        for delta in deltas:
            if isinstance(delta, (ContentDelta, ReasoningDelta)):
                yield delta
                continue
            if isinstance(delta, ToolCallStart) and self._only is None:
                self._only = delta.index
            is_kept = delta.index == self._only
            if is_kept:
                yield delta
            if isinstance(delta, ToolCallBroken):
                if is_kept:
                    self._only = None
                else:
                    yield ContentDelta(delta.text)
