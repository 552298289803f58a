"""`Frontend` turns users' input into engine requests.

Everything that can be checked is checked here, so the engine sees only requests it can run.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.config import ChatConfig, MediaConfig, ModelConfig
from penstock.config.model import GENERATION_CONFIG_NAMES
from penstock.loading.source import ModelSource
from penstock.protocol.beam_search import BeamSearchParams
from penstock.protocol.errors import ConfigError, ContextOverflow, InputError, ModelError
from penstock.protocol.limits import StepLimits
from penstock.protocol.media import MediaItem
from penstock.protocol.pooling import PoolingInfo
from penstock.protocol.request import EngineRequest, ThinkingFormat
from penstock.protocol.sampling import SamplingParams, check_int
from penstock.text.output import OutputAssembler
from penstock.text.parsing.parser import (
    Detected,
    ParserContext,
    check_names,
    detect,
    reasoning_format,
    thinking_is_open,
)
from penstock.text.renderers.base import Renderer
from penstock.text.renderers.choose import choose_renderer
from penstock.text.renderers.generic_tools import GenericToolRenderer
from penstock.text.renderers.template import ChatTemplate
from penstock.text.tokenizer import (
    EncodePiece,
    Tokenizer,
    TooManyTokens,
    eos_token_ids,
    load_tokenizer,
)

if TYPE_CHECKING:
    from penstock.media.content import MediaContent
    from penstock.media.frontend import MediaFrontend, Processed
    from penstock.text.text_pool import TextPool

MAX_SALT_LENGTH = 1024  # characters; the engine keeps salts
# Whether a chat template gets content in parts; None: if it loops over them.
CONTENT_FORMATS = {"auto": None, "string": False, "openai": True}
PROMPT_TAIL = 32  # tokens that show whether the prompt opened the reasoning


@dataclass(frozen=True)
class PreparedRequest:
    """A user's request: one engine request per completion, and the assembler of their outputs."""

    request_id: str
    children: list[EngineRequest]
    assembler: OutputAssembler
    beams: BeamSearchParams | None = None  # instead of sampling
    media: Sequence[Processed] = ()  # their files live as long as the request


class Frontend:
    """The text side of one model. `parsers` names the output parsers, if any.

    With a `pool`, confined processes handle long texts and clients' templates. `seeds` draws seeds
    for requests without one; by default they repeat with `config.seed`.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: ModelSource,
        max_model_len: int,
        chat: ChatConfig | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        self.chat = chat = chat or ChatConfig()
        self.max_model_len = max_model_len
        self.vocab_size = int(source.config["vocab_size"])
        self.max_logprobs = config.max_logprobs
        self.logprobs_mode = config.logprobs_mode
        self.needs_every_row = config.enable_return_routed_experts  # including prompt tokens
        self.tokenizer: Tokenizer | None = None
        self.pool: TextPool | None = None
        self.media: MediaFrontend | None = None  # of a model that takes images
        self.renderer: Renderer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(source, config.tokenizer)
            self.renderer = choose_renderer(
                chat.chat_renderer,
                source,
                self.tokenizer,
                config.chat_template,
                chat.tool_call_parser,
                CONTENT_FORMATS[chat.chat_template_content_format],
            )
        self.parsers = choose_parsers(chat, self.renderer)
        self.default_template_kwargs = chat.default_chat_template_kwargs or {}
        self.eos_token_ids = eos_token_ids(source, self.tokenizer)
        self.default_params = _default_params(config, source)
        self.pooling: PoolingInfo | None = None  # of a pooling model, from its engine
        self._seeds = seeds or random.Random(config.seed)

    @property
    def takes_images(self) -> bool:
        return self.media is not None and self.media.config.limit_of("image") != 0

    def check_generates(self) -> None:
        """Refuse a request for text if the model pools."""
        if self.pooling is not None:
            raise InputError(
                f"this model generates no text: it is served for {', '.join(self.pooling.tasks)}; "
                "use a pooling route or method, such as /v1/embeddings, /classify or /score",
                "model",
            )

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        shown_tokens: Collection[str] = (),
        media: Sequence[MediaContent] = (),
    ) -> PreparedRequest:
        """Check and tokenize one request. `InputError` says what is wrong with it.

        `shown_tokens` appear in the output's text even if they are special tokens.
        """
        self.check_generates()
        params = msgspec.structs.replace(params)  # the user may change theirs meanwhile
        params.validate()
        try:
            items, token_ids, placed = self.tokenize(
                prompt, add_special_tokens, self.max_model_len, media
            )
        except TooManyTokens as error:
            raise ContextOverflow(
                error.num_tokens, self.max_model_len, is_exact=error.is_exact
            ) from None
        text = prompt if isinstance(prompt, str) else None
        self._check_prompt(token_ids)
        self._check_params(params)
        check_int("priority", priority, -(2**63), 2**63 - 1)
        check_salt(cache_salt)
        room = self.max_model_len - len(token_ids)
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if params.thinking_token_budget == -1:
            params.thinking_token_budget = None
        thinking = self._thinking_format(params, text, token_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        only = params.n == 1
        unasked = msgspec.structs.replace(params, prompt_logprobs=None)
        bad_words = self._bad_words(params.bad_words or [])
        by_child = [params] + [unasked] * (params.n - 1)  # prompt logprobs are needed once
        children = [
            EngineRequest(
                request_id=request_id if only else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                params=own,
                seed=seed if only else child_seed(seed, index),
                eos_token_ids=self.eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival_time=time.monotonic(),  # the wall clock may jump
                cache_salt=cache_salt,
                read_prefix_cache=own.prompt_logprobs is None and not self.needs_every_row,
                thinking=thinking,
                media=placed,
            )
            for index, own in enumerate(by_child)
        ]
        assembler = OutputAssembler(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            tokenizer=self.tokenizer,
            child_ids=[child.request_id for child in children],
            shown_tokens=shown_tokens,
        )
        return PreparedRequest(request_id, children, assembler, media=items)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """The prompt of a conversation. It includes special tokens: add none when tokenizing.

        `chat_template` replaces the model's own.
        """
        if self.renderer is None or self.tokenizer is None:
            raise InputError("chat needs a tokenizer: drop skip_tokenizer_init", "messages")
        options = {**self.default_template_kwargs, **options}
        if chat_template is None:
            return self.renderer.render(messages, **options)
        if self.pool is not None:
            return self.pool.render(chat_template, messages, options)
        own = ChatTemplate({"default": chat_template}, self.tokenizer.special_tokens)
        return own.render(messages, **options)

    def encode(self, text: str, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """The tokens of a text. Raises `TooManyTokens` if there are more than `limit`."""
        return self.known_tokenizer().encode(text, add_special_tokens, limit, self.encode_piece)

    def encode_part(
        self, text: str, num_tokens: int, side: Literal["first", "last"], add_special_tokens: bool
    ) -> list[int]:
        """The first or the last tokens of a text."""
        return self.known_tokenizer().encode_part(
            text, num_tokens, side, add_special_tokens, self.encode_piece
        )

    @property
    def encode_piece(self) -> EncodePiece | None:
        return None if self.pool is None else self.pool.encode_piece

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("there is no tokenizer: skip_tokenizer_init is set")
        return self.tokenizer

    def known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(
                "prompt must be token ids, since skip_tokenizer_init is set: "
                'pass {"prompt_token_ids": [...]}',
                "prompt",
            )
        return self.tokenizer

    def tokenize(
        self,
        prompt: str | Sequence[int],
        add_special_tokens: bool,
        limit: int,
        media: Sequence[MediaContent] = (),
    ) -> tuple[list[Processed], list[int], list[MediaItem]]:
        """Process the media of a prompt. Returns them, its tokens, and where the media are.

        Raises `TooManyTokens` for a text of more than `limit` tokens.
        """
        if not media:
            if isinstance(prompt, str):
                return [], self.encode(prompt, add_special_tokens, limit), []
            return [], list(prompt), []
        items = self._process(media)
        assert self.media is not None
        if isinstance(prompt, str):
            expanded, items = self.media.expand_text(prompt, items)
            begins_later = bool(self.media.info().after_media)
            token_ids = self.encode(expanded, add_special_tokens and not begins_later, limit)
        else:
            token_ids, items = self.media.expand_tokens(
                prompt, items, lambda text: self.encode(text, add_special_tokens=False)
            )
        token_ids, placed = self.media.place(token_ids, items)
        return items, token_ids, placed

    def _process(self, media: Sequence[MediaContent]) -> list[Processed]:
        if self.media is None:
            raise InputError(
                f"{media[0].where}: this model takes text only, or its vision tower is not loaded "
                "(limit_mm_per_prompt, language_model_only)",
                media[0].where,
            )
        self.media.check_counts(media)
        return [self.media.process(content) for content in media]

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InputError("prompt must contain at least one token, got none", "prompt")
        self.check_token_ids(token_ids, "prompt_token_ids")
        if len(token_ids) >= self.max_model_len:
            raise ContextOverflow(len(token_ids), self.max_model_len)

    def check_beams(self) -> None:
        """Raise `InputError` if sequences cannot be compared by their logprobs."""
        if self.logprobs_mode in ("raw_logits", "processed_logits"):
            raise InputError(
                f"beam search needs logprobs, but the engine's logprobs_mode is "
                f"{self.logprobs_mode}: set it to raw_logprobs",
                "use_beam_search",
            )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked, most = getattr(params, name), self.max_logprobs
            if asked is None or most == -1:
                continue
            if (self.vocab_size if asked == -1 else asked) > most:
                all_of_them = f"; -1 are all {self.vocab_size}" if asked == -1 else ""
                raise InputError(
                    f"{name} must be from 0 to {most} (the engine's max_logprobs), "
                    f"got {asked}{all_of_them}",
                    name,
                )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            token_ids = getattr(params, name) or ()
            if len(token_ids) > self.vocab_size:
                raise InputError(
                    f"{name} may contain at most {self.vocab_size} token ids, as many as there "
                    "are, "
                    f"got {len(token_ids)}",
                    name,
                )
            self.check_token_ids(token_ids, name)
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InputError(f"{name} needs a tokenizer: drop skip_tokenizer_init", name)

    def check_token_ids(self, token_ids: Sequence[int] | Mapping[int, Any], name: str) -> None:
        # Prompts are long and nearly always right: no loop in Python for those.
        if not token_ids or (
            set(map(type, token_ids)) == {int}
            and min(token_ids) >= 0
            and max(token_ids) < self.vocab_size
        ):
            return
        for token_id in token_ids:
            is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self.vocab_size:
                raise InputError(
                    f"{name} must contain token ids from 0 to {self.vocab_size - 1}, got "
                    f"{token_id!r}",
                    name,
                )

    def _thinking_format(
        self, params: SamplingParams, prompt: str | None, token_ids: list[int]
    ) -> ThinkingFormat | None:
        """How to end the reasoning, for a request with a thinking budget."""
        if params.thinking_token_budget is None:
            return None
        name, parser = "thinking_token_budget", self.parsers.reasoning
        if parser is None or self.tokenizer is None:
            raise InputError(
                f"{name} needs to know how this model writes its reasoning, if it does: give the "
                "engine a reasoning_parser",
                name,
            )
        form = reasoning_format(parser, self.renderer.source if self.renderer else "")
        if prompt is None:
            prompt = self.tokenizer.decode(token_ids[-PROMPT_TAIL:], skip_special_tokens=False)
        closing = self.tokenizer.encode(form.closing, add_special_tokens=False)
        allowed = params.allowed_token_ids
        if allowed is not None and not set(closing) <= set(allowed):
            raise InputError(
                f"allowed_token_ids must contain those that end the reasoning for {name}: "
                f"{closing}",
                "allowed_token_ids",
            )
        return ThinkingFormat(
            starts=list(form.starts),
            ends=list(form.ends),
            closing_token_ids=closing,
            is_open=thinking_is_open(parser, ParserContext(prompt=prompt)),
        )

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word, at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelling in (word, " " + word.lstrip()):
                token_ids = self.encode(spelling, add_special_tokens=False)
                if token_ids:
                    sequences[tuple(token_ids)] = None
        return [list(token_ids) for token_ids in sequences]


def choose_parsers(config: ChatConfig, renderer: Renderer | None) -> Detected:
    """The parsers that the operator named, else those that the template needs.

    If tools were added to a template that shows none, the parser reads calls in the added format.
    """
    found = detect(renderer.source) if renderer is not None else Detected(None, None)
    if isinstance(renderer, GenericToolRenderer):
        found = found._replace(tools=renderer.parser)
    reasoning, tools = config.reasoning_parser, config.tool_call_parser
    reasoning = found.reasoning if reasoning is None else reasoning
    tools = found.tools if tools is None else tools
    chosen = Detected(
        reasoning=None if reasoning == "none" else reasoning,
        tools=None if tools == "none" else tools,
    )
    check_names(*chosen)
    return chosen


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with `n` > 1."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _default_params(config: ModelConfig, source: ModelSource) -> SamplingParams:
    given = source.generation_config if config.generation_config == "auto" else {}
    values = {name: given[name] for name in GENERATION_CONFIG_NAMES if given.get(name) is not None}
    try:
        defaults = SamplingParams(**values)
    except InputError as error:
        raise ModelError(
            f"{source.path}: generation_config.json is wrong: {error}; generation_config=none "
            "leaves it unread"
        ) from error
    return msgspec.structs.replace(defaults, **config.override_generation_config or {})


def open_media(
    frontend: Frontend, config: MediaConfig, source: ModelSource, limits: StepLimits
) -> None:
    """Let the frontend take media, if the engine does."""
    if limits.encoder_rows:
        from penstock.media.frontend import MediaFrontend  # most models need none of it
        from penstock.text.gguf_processor import media_setup

        frontend.media = MediaFrontend(
            config, source, lambda: media_setup(source), limits.encoder_width
        )


def check_salt(cache_salt: str | None) -> None:
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str):
        raise InputError(f"cache_salt must be a string, got {cache_salt!r:.80}", "cache_salt")
    if len(cache_salt) > MAX_SALT_LENGTH:
        raise InputError(
            f"cache_salt may have at most {MAX_SALT_LENGTH} characters, got {len(cache_salt)}: "
            "send a hash of it",
            "cache_salt",
        )
