"""Prepares requests for the engine from conversations or prompts: checks, renders, tokenizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.conversation.media import take_media
from penstock.conversation.output import Parsing, TurnReader
from penstock.conversation.request import NamedTool, RunOptions, TurnRequest
from penstock.protocol.choice import why_no_token
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.text.frontend import Frontend, PreparedRequest
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import ParserContext
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.media.content import MediaContent

GIVEN_APART = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
)  # fmt: skip
PROMPT_TAIL = 4096  # characters of the prompt's end that parsers see


@dataclass(frozen=True)
class PreparedTurn:
    request: PreparedRequest
    reader: TurnReader


def tokenize_turn(frontend: Frontend, request: TurnRequest, limit: int) -> list[int]:
    """The prompt's tokens, those of its media included. Slow: call it in a thread.

    Raises `TooManyTokens` if there are more than `limit`.
    """
    prompt, media = render_turn(frontend, request)
    special = request.options.add_special_tokens
    return frontend.tokenize(prompt, special, limit, media)[1]


def render_turn(frontend: Frontend, request: TurnRequest) -> tuple[str, list[MediaContent]]:
    """The prompt of a turn, with placeholders for its media, and these.

    Slow: call it in a thread.
    """
    if request.chat_template is not None and not frontend.chat.trust_request_chat_template:
        raise InputError(
            "chat_template is not allowed in requests: start the server with "
            "--trust-request-chat-template, or set --chat-template for all requests",
            "chat_template",
        )
    options: dict[str, Any] = {}
    if request.tools and request.tool_choice != "none":
        options["tools"] = [_as_openai(tool) for tool in request.tools]
    if request.documents:
        options["documents"] = request.documents
    if request.chat_template is not None:
        options["chat_template"] = request.chat_template
    check_template_kwargs(request.template_kwargs, options)
    messages, media = take_media(frontend, request.messages, request.media)
    try:
        prompt = frontend.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **options,
            **_template_kwargs(frontend, request),
        )
        return prompt, media
    except RecursionError as error:
        raise InputError(
            "messages, documents and chat_template_kwargs must be nested less deeply", "messages"
        ) from error


def check_template_kwargs(kwargs: Mapping[str, Any], others: Collection[str] = ()) -> None:
    """Refuse keywords that have their own field: `GIVEN_APART` and `others`."""
    for name in (*GIVEN_APART, *others):
        if name in kwargs:
            raise InputError(
                f"chat_template_kwargs must not contain {name}, which is a separate field",
                "chat_template_kwargs",
            )


def prepare_turn(frontend: Frontend, request: TurnRequest, request_id: str) -> PreparedTurn:
    """Check, render and tokenize a turn. Raises `InputError`. Slow: call it in a thread."""
    _check_tool_choice(frontend, request)
    prompt, media = render_turn(frontend, request)
    context = ParserContext(
        prompt=prompt[-PROMPT_TAIL:],
        continued=_continued_text(request),
        template_kwargs=_template_kwargs(frontend, request),
    )
    markers = Parsing(frontend, request, context).make_parser().markers
    token_bytes = _token_bytes(frontend.tokenizer, request.params, markers)
    parsing = Parsing(frontend, request, replace(context, token_bytes=token_bytes))
    params = parsing.constrain(request.params)
    prepared = prepare_request(
        frontend, prompt, params, request_id, request.options, markers, media
    )
    return PreparedTurn(prepared, TurnReader(parsing, params.n, prepared.children[0]))


def _check_tool_choice(frontend: Frontend, request: TurnRequest) -> None:
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
    if not frontend.chat.enable_auto_tool_choice:
        raise InputError(
            'tool_choice "auto" is turned off (--no-enable-auto-tool-choice): choose '
            '"required", a function or "none"',
            "tool_choice",
        )
    if frontend.parsers.tools is None:
        raise InputError(
            'tool_choice "auto" needs to know how this model writes calls, which its chat template '
            "does not tell: set tool_call_parser (--tool-call-parser), or choose "
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
    if thinking is not None:  # the names that templates use
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
        texts = [part for part in content if isinstance(part, Mapping) and part["type"] == "text"]
        return "".join(str(part.get("text", "")) for part in texts)
    return str(content or "")


def _token_bytes(
    tokenizer: Tokenizer | None, params: SamplingParams, shown_tokens: Collection[str]
) -> Callable[[int], bytes] | None:
    """Return a function from a token to its bytes in the parsed text, or None if unknown."""
    if tokenizer is None or not tokenizer.spells_bytes:
        return None
    hidden = tokenizer.hidden_ids(params.skip_special_tokens, shown_tokens)
    spell = tokenizer.token_bytes
    return lambda token_id: b"" if token_id in hidden else spell(token_id)


def prepare_request(
    frontend: Frontend,
    prompt: str | list[int],
    params: SamplingParams,
    request_id: str,
    options: RunOptions,
    shown_tokens: Collection[str] = (),
    media: Sequence[MediaContent] = (),
) -> PreparedRequest:
    """Check and tokenize a request. Raises `InputError`. Slow: call it in a thread."""
    if options.truncation is not None and media:
        raise InputError(
            "truncate_prompt_tokens cannot be combined with images: leave one out",
            "truncate_prompt_tokens",
        )
    if options.truncation is not None:
        prompt = _truncate(frontend, options, prompt, params)
    prepared = frontend.prepare(
        request_id,
        prompt,
        params,
        add_special_tokens=options.add_special_tokens,
        priority=options.priority,
        cache_salt=options.cache_salt,
        shown_tokens=shown_tokens,
        media=media,
    )
    child = prepared.children[0]
    if wrong := why_no_token(child, child.prompt_token_ids, frontend.vocab_size):
        raise wrong  # now, not after the request has reached the engine
    if options.beams is None:
        return prepared
    frontend.check_beams()
    if child.sampling.is_masked:
        raise InputError(
            "use_beam_search cannot be combined with tool calls that are enforced: leave one out",
            "use_beam_search",
        )
    return replace(prepared, beams=options.beams)


def _truncate(
    frontend: Frontend, options: RunOptions, prompt: str | list[int], params: SamplingParams
) -> list[int]:
    assert options.truncation is not None
    keep = options.truncation.keep
    if keep == -1:
        keep = max(frontend.max_model_len - (params.max_tokens or 1), 1)
    if keep < 1:
        raise InputError(
            f"truncate_prompt_tokens must be at least 1, or -1, got {keep}",
            "truncate_prompt_tokens",
        )
    is_right = options.truncation.side == "right"
    if isinstance(prompt, str):
        side: Literal["first", "last"] = "first" if is_right else "last"
        return frontend.encode_part(prompt, keep, side, options.add_special_tokens)
    return prompt[:keep] if is_right else prompt[-keep:]
