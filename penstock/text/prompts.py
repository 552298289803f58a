"""Prompts as users give them: texts, tokens and dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import InputError
from penstock.protocol.vllm_fields import NOT_SUPPORTED

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from penstock.media.content import MediaContent

# A text, its tokens, {"prompt": text} or {"prompt_token_ids": [...]}.
Prompt = str | Sequence[int] | Mapping[str, Any]
MEDIA_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", *MEDIA_KEYS)

TokenizationKwargs = Mapping[str, Any] | None


@dataclass(frozen=True)
class PromptOptions:
    """How the prompts of one call are tokenized and their media processed."""

    add_special_tokens: bool = True
    processor_kwargs: Mapping[str, Any] | None = None


TEXT = PromptOptions()
RENDERED = PromptOptions(add_special_tokens=False)  # of a chat template, which writes them itself


def read_options(
    tokenization_kwargs: TokenizationKwargs,
    mm_processor_kwargs: Mapping[str, Any] | None,
    default: PromptOptions = TEXT,
) -> PromptOptions:
    """The options of a call by its keywords, which have vLLM's names."""
    given = tokenization_kwargs or {}
    for name, value in given.items():
        if name != "add_special_tokens" and value not in (None, False):
            raise InputError(
                f"tokenization_kwargs may contain add_special_tokens, got {name!r}: to do more, "
                "tokenize with get_tokenizer() and pass the token IDs",
                "tokenization_kwargs",
            )
    add_special_tokens = given.get("add_special_tokens")
    if not isinstance(add_special_tokens, (bool, type(None))):
        raise InputError(
            f"tokenization_kwargs.add_special_tokens must be bool, got {add_special_tokens!r:.80}",
            "tokenization_kwargs",
        )
    if add_special_tokens is None:
        add_special_tokens = default.add_special_tokens
    return PromptOptions(add_special_tokens, mm_processor_kwargs)


def is_tokens(prompt: object) -> TypeIs[Sequence[int]]:
    """Whether it is a list of tokens, by its first."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and type(prompt[0]) is int


def read_prompt(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """A prompt's text or tokens, and its cache_salt."""
    if isinstance(prompt, str) or is_tokens(prompt):
        return prompt, None
    if isinstance(prompt, Mapping):
        for name, value in prompt.items():
            is_empty = value is None or (isinstance(value, (str, list, dict)) and not value)
            if name not in PROMPT_KEYS and not is_empty:
                foreign = NOT_SUPPORTED.get(name)
                hint = f": {foreign.text}" if foreign is not None else ""
                raise InputError(
                    f"a prompt may contain {', '.join(PROMPT_KEYS)}, got {name!r}{hint}", "prompt"
                )
        if isinstance(prompt.get("prompt_token_ids"), (list, tuple)):
            return prompt["prompt_token_ids"], prompt.get("cache_salt")
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], prompt.get("cache_salt")
    raise InputError(
        'a prompt must be a text, a list of tokens, {"prompt": text} or {"prompt_token_ids": '
        "[...]}, "
        f"got {prompt!r:.80}",
        "prompt",
    )


def read_media(
    prompt: Prompt, processor_kwargs: Mapping[str, Any] | None = None
) -> list[MediaContent]:
    """The media of a prompt. Its own `mm_processor_kwargs` come before `processor_kwargs`."""
    if not isinstance(prompt, Mapping) or not prompt.get("multi_modal_data"):
        return []
    from penstock.media.content import read_multi_modal_data, with_kwargs

    found = read_multi_modal_data(
        prompt["multi_modal_data"],
        prompt.get("mm_processor_kwargs"),
        prompt.get("multi_modal_uuids"),
    )
    return [with_kwargs(item, processor_kwargs) for item in found]


def with_priorities(
    prompts: Prompt | Sequence[Prompt], priority: Sequence[int] | None
) -> list[tuple[Prompt, int]]:
    """One prompt or several, each with its priority."""
    is_one = isinstance(prompts, (str, Mapping)) or is_tokens(prompts)
    several = isinstance(prompts, Iterable) and not is_one
    items: list[Any] = list(prompts) if several else [prompts]
    if priority is None:
        return [(item, 0) for item in items]
    if not isinstance(priority, (list, tuple)) or len(priority) != len(items):
        raise InputError(
            f"priority must be a list with one number per prompt ({len(items)}), "
            f"got {priority!r:.80}",
            "priority",
        )
    return list(zip(items, priority, strict=True))
