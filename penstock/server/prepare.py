"""From a prompt to a request that the engine can run, whichever API it came through."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from penstock.protocol.choice import why_no_token
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.server.service import Service
from penstock.text.frontend import Frontend, PreparedRequest


@dataclass(frozen=True)
class Truncation:
    """Keep `keep` tokens of a prompt, -1: as many as the model takes; cut the others off `side`."""

    keep: int
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class RunOptions:
    """How a request is run, apart from its prompt and its sampling."""

    add_special_tokens: bool = False
    priority: int = 0
    cache_salt: str | None = None
    truncation: Truncation | None = None
    timeout_s: float | None = None


def prepare_request(
    service: Service,
    prompt: str | list[int],
    params: SamplingParams,
    request_id: str,
    options: RunOptions,
    shown_tokens: Collection[str] = (),
) -> PreparedRequest:
    """Check and tokenize a request: `InputError` says what is wrong with it. Takes time."""
    frontend = service.frontend
    if options.truncation is not None:
        prompt = _truncate(frontend, options, prompt, params)
    prepared = frontend.prepare(
        service.engine_id(request_id),
        prompt,
        params,
        add_special_tokens=options.add_special_tokens,
        priority=options.priority,
        cache_salt=options.cache_salt,
        shown_tokens=shown_tokens,
    )
    child = prepared.children[0]
    if wrong := why_no_token(child, child.prompt_token_ids, frontend.vocab_size):
        raise wrong  # now, rather than when the engine finds out
    return prepared


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
