"""A turn: a conversation and tools in, typed pieces of the assistant's next message out.

What every chat API stands on. Each API turns its body into a `TurnRequest`, calls `prepare_turn`
in a thread, and writes what comes out of the `Turn` in its own words:

    turn = await service.in_thread(prepare_turn, service, request, request_id)
    async with contextlib.aclosing(turn.steps()) as steps:   # as pieces come
        async for step in steps: ...
    answers = await turn.whole()                              # or all at the end
    turn.usage                                                # counts so far; final at the end

Set `params.output_kind` to DELTA for pieces as they come, to FINAL_ONLY for `whole`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.protocol.errors import InputError
from penstock.protocol.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from penstock.protocol.sampling import SamplingParams
from penstock.server.prepare import RunOptions, prepare_request
from penstock.server.service import Service
from penstock.server.turn_grammar import after_reasoning, hold_to_calls, hold_to_format
from penstock.text.frontend import Frontend, PreparedRequest
from penstock.text.parsing.deltas import (
    ContentDelta,
    Delta,
    Message,
    Part,
    ReasoningDelta,
    ToolCallBroken,
    ToolCallStart,
    message_of,
    parts_of,
)
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import OutputParser, ParserContext, make_output_parser
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROMPT_TAIL = 4096  # characters: parsers look at how a prompt ends
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True)
class NamedTool:
    """The tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class TurnRequest:
    """What an API asks for.

    `messages` have the form of OpenAI's chat: `role` and `content` (a text, or parts of type
    text); an assistant's may have `tool_calls` (`id`, `type`, `function` with `name` and
    `arguments` as JSON text) and `reasoning`; the results of calls are messages of role "tool"
    with `tool_call_id`. `params.structured_outputs` is the form of the answer, if it must have
    one; it holds after the reasoning, and does not keep the model from calling tools.

    `tool_choice` "auto" lets the model decide, "required" and `NamedTool` are enforced, the
    latter as exactly one call. Without tools it counts for nothing. `thinking` asks the template
    to have the model think or not; None leaves it alone. `template_kwargs` win over everything
    that is derived.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None  # in place of the model's own, if the operator allows it
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: RunOptions = field(default_factory=RunOptions)


@dataclass(slots=True)
class TurnStep:
    """What is new about one of the `n` choices; `deltas` in the order they were written.

    With `finish_reason` the choice is over. A `ToolCallBroken` among the deltas takes back a call:
    its text belongs to the content. A call without a `ToolCallEnd` was cut off.
    """

    index: int
    deltas: list[Delta]
    token_ids: list[int]
    logprobs: list[LogprobsAtPosition] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    routed_experts: npt.NDArray[np.int16] | None = None


@dataclass(frozen=True)
class TurnAnswer:
    """One choice, whole."""

    index: int
    parts: list[Part]  # in the order in which they were written
    token_ids: list[int]
    logprobs: list[LogprobsAtPosition] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    routed_experts: npt.NDArray[np.int16] | None = None

    @property
    def message(self) -> Message:
        return message_of(self.parts)


@dataclass
class TurnUsage:
    """Tokens of all choices together. `num_cached` are prompt tokens from the prefix cache."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_reasoning: int = 0

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_completion

    def add(self, other: TurnUsage) -> None:
        self.num_prompt += other.num_prompt
        self.num_cached += other.num_cached
        self.num_completion += other.num_completion
        self.num_reasoning += other.num_reasoning


def render_turn(service: Service, request: TurnRequest) -> str:
    """The prompt of a turn. Takes time: call it in a thread."""
    if request.chat_template is not None and not service.config.chat.trust_request_chat_template:
        raise InputError(
            "chat_template is not taken from requests: start the server with --chat-template, or "
            "with --trust-request-chat-template",
            "chat_template",
        )
    options: dict[str, Any] = {}
    if request.tools and request.tool_choice != "none":
        options["tools"] = [_as_openai(tool) for tool in request.tools]
    if request.documents:
        options["documents"] = request.documents
    if request.chat_template is not None:
        options["chat_template"] = request.chat_template
    try:
        return service.frontend.render_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **options,
            **_template_kwargs(service.frontend, request),
        )
    except RecursionError as error:
        raise InputError(
            "messages, documents and chat_template_kwargs must be nested less deeply", "messages"
        ) from error


def prepare_turn(service: Service, request: TurnRequest, request_id: str) -> Turn:
    """Check, render and tokenize. `InputError` says what is wrong. Call it in a thread."""
    _check_tool_choice(service, request)
    prompt = render_turn(service, request)
    frontend = service.frontend
    context = ParserContext(
        prompt=prompt[-PROMPT_TAIL:],
        continued=_continued_text(request),
        template_kwargs=_template_kwargs(frontend, request),
    )
    markers = _Parsing(frontend, request, context).make_parser().markers
    token_bytes = _token_bytes(frontend.tokenizer, request.params, markers)
    parsing = _Parsing(frontend, request, replace(context, token_bytes=token_bytes))
    params = parsing.constrain(request.params)
    prepared = prepare_request(service, prompt, params, request_id, request.options, markers)
    return Turn(service, prepared, parsing, params.n, request.options.timeout_s)


class Turn:
    """One request on its way through the engine. `steps` or `whole` may be called once.

    `prompt_logprobs` are known from the first step on.
    """

    def __init__(
        self,
        service: Service,
        prepared: PreparedRequest,
        parsing: _Parsing,
        num_choices: int,
        timeout_s: float | None,
    ) -> None:
        self._service = service
        self._prepared = prepared
        self._timeout_s = timeout_s
        self._choices = [_Choice(index, parsing) for index in range(num_choices)]
        self.prompt_token_ids = prepared.children[0].prompt_token_ids
        self.prompt_logprobs: list[LogprobsAtPosition | None] | None = None
        self.usage = TurnUsage(num_prompt=len(self.prompt_token_ids))

    async def steps(self) -> AsyncGenerator[TurnStep, None]:
        """Pieces of every choice as they come. Close it when leaving early: that aborts."""
        outputs = self._service.outputs([self._prepared], self._timeout_s)
        async with contextlib.aclosing(outputs):
            async for _, output in outputs:
                for item in output.outputs:
                    step = self._choices[item.index].take(item)
                    self._count(output, item)
                    yield step

    async def whole(self) -> list[TurnAnswer]:
        """Every choice, when all are finished."""
        by_choice: dict[int, list[TurnStep]] = {}
        async with contextlib.aclosing(self.steps()) as steps:
            async for step in steps:
                by_choice.setdefault(step.index, []).append(step)
        return [_join(by_choice[index]) for index in sorted(by_choice)]

    def _count(self, output: RequestOutput, item: CompletionOutput) -> None:
        self.usage.num_cached = output.num_cached_tokens
        self.usage.num_completion += len(item.token_ids)
        self.usage.num_reasoning += self._choices[item.index].num_new_reasoning_tokens()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


def _join(steps: Sequence[TurnStep]) -> TurnAnswer:
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
    )


class _Parsing:
    """How the outputs of one turn are read, and what they are held to."""

    def __init__(self, frontend: Frontend, request: TurnRequest, context: ParserContext) -> None:
        self._frontend = frontend
        self._context = context
        choice = request.tool_choice
        # OpenAI's API makes one call where the tool is named, whatever else is asked for.
        self.allows_several_calls = request.parallel_tool_calls and not isinstance(
            choice, NamedTool
        )
        self._enforced = bool(request.tools) and choice not in ("none", "auto")
        self._tools = [] if choice == "none" else list(request.tools)
        if isinstance(choice, NamedTool):
            self._tools = [tool for tool in request.tools if tool.name == choice.name]
        self._is_free = request.params.structured_outputs is None
        # Enforced calls need no parser of the model's own: then they are plain JSON.
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
        """The params, with the grammar that the choice of tools and the answer's form ask for."""
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


class _Choice:
    """One completion as it is parsed."""

    def __init__(self, index: int, parsing: _Parsing) -> None:
        self.parser = parsing.make_parser()
        self._index = index
        self._allows_several = parsing.allows_several_calls
        self._calls: set[int] = set()
        self._only: int | None = None  # the one call there may be, where there may be one
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
        )

    def num_new_reasoning_tokens(self) -> int:
        """How many there are more than when this was last asked; a negative number can be."""
        before, self._num_reasoning_tokens = (
            self._num_reasoning_tokens, self.parser.num_reasoning_tokens
        )  # fmt: skip
        return self._num_reasoning_tokens - before

    def _first_call_alone(self, deltas: list[Delta]) -> Iterator[Delta]:
        """Without calls after the first; one that turns out to be none makes room for the next."""
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


def _check_tool_choice(service: Service, request: TurnRequest) -> None:
    choice, names = request.tool_choice, [tool.name for tool in request.tools]
    if isinstance(choice, NamedTool) and choice.name not in names:
        offered = ", ".join(names) or "none"
        raise InputError(
            f"tool_choice names {choice.name!r}, which is not among the tools: {offered}",
            "tool_choice",
        )
    if choice == "required" and not names:
        raise InputError("tool_choice required needs tools to choose from", "tool_choice")
    if choice != "auto" or not names:
        return
    if not service.config.chat.enable_auto_tool_choice:
        raise InputError(
            'tool_choice "auto" is turned off here (--no-enable-auto-tool-choice): choose '
            '"required", a function or "none"',
            "tool_choice",
        )
    if service.frontend.parsers.tools is None:
        raise InputError(
            'tool_choice "auto" needs to know how this model writes calls, which its chat template '
            "does not tell: start the server with --tool-call-parser, or choose "
            '"required", a function or "none"',
            "tool_choice",
        )


def _template_kwargs(frontend: Frontend, request: TurnRequest) -> dict[str, Any]:
    kwargs = dict(frontend.default_template_kwargs)
    thinking = request.thinking
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        if thinking is None and request.reasoning_effort == "none":
            thinking = False
    if thinking is not None:  # the names that templates know it by
        kwargs |= {"enable_thinking": thinking, "thinking": thinking}
    return {**kwargs, **request.template_kwargs}


def _as_openai(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": dict(tool.parameters)}}


def _continued_text(request: TurnRequest) -> str:
    if not request.continue_final_message or not request.messages:
        return ""
    content = request.messages[-1].get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def _token_bytes(
    tokenizer: Tokenizer | None, params: SamplingParams, shown_tokens: Collection[str]
) -> Callable[[int], bytes] | None:
    """What each token adds to the text that is parsed, where that can be told."""
    if tokenizer is None or not tokenizer.spells_bytes:
        return None
    hidden = tokenizer.hidden_ids(params.skip_special_tokens, shown_tokens)
    spell = tokenizer.token_bytes
    return lambda token_id: b"" if token_id in hidden else spell(token_id)
