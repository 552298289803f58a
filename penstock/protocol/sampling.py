"""SamplingParams: what a user may ask of the sampler, checked on construction."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Collection
from typing import Any

import msgspec

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.protocol.vllm_fields import ParamsMeta

MAX_N = 128
# No request of good faith comes near these; they bound what one can make the engine allocate.
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_TEXT_LENGTH = 4096  # of a stop string or a bad word, in characters
MAX_TEXTS_LENGTH = 32 * 1024  # of all stop strings, or of all bad words
MAX_BIAS_ENTRIES = 1024
MAX_BIAS = 100
MAX_LOGPROB_TOKEN_IDS = 128
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "speculative",
)


class OutputKind(enum.IntEnum):
    """How much of the output each `RequestOutput` holds."""

    CUMULATIVE = 0
    """Everything so far, every time."""
    DELTA = 1
    """Only what is new since the last one."""
    FINAL_ONLY = 2
    """One output, when the request is finished."""


RequestOutputKind = OutputKind  # the name that vLLM's users know


class SamplingParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag="sampling", metaclass=ParamsMeta
):
    """How to choose the next token, and when to stop."""

    # The text beneath a field is its help; {NAME} there is a constant of this module.
    n: int = 1
    """Number of completions for the prompt."""
    presence_penalty: float = 0.0
    """Penalty for tokens that already occur in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Penalty per occurrence of a token in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """Penalty for tokens in the prompt or the output. Divides positive logits and multiplies
    negative ones; 0.01 to 100."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this; (0, 1]."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely one; [0, 1]."""
    seed: int | None = None
    """Seed for reproducible output. Default: a random seed for each request."""
    stop: str | list[str] | None = None
    """Strings that end the output; at most {MAX_STOP_STRINGS}."""
    stop_token_ids: list[int] | None = None
    """Token IDs that end the output."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Maximum tokens to generate; None: as many as the context allows."""
    min_tokens: int = 0
    """Minimum tokens to generate before a stop token or stop string can end the output."""
    logprobs: int | None = None
    """Number of most likely tokens to return logprobs for, in addition to the sampled one;
    -1: all."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    logprob_token_ids: list[int] | None = None
    """Return logprobs of these tokens instead of the most likely ones; at most 128."""
    detokenize: bool = True
    """Convert tokens to text. If off, `text` is empty and stop strings are not allowed."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility. The tokenizer's spacing is always used."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    output_kind: OutputKind = OutputKind.CUMULATIVE
    """What each output of a stream holds."""
    logit_bias: dict[int, float] | None = None
    """Bias for the logits of token IDs, -{MAX_BIAS} to {MAX_BIAS}; at most {MAX_BIAS_ENTRIES}
    entries."""
    allowed_token_ids: list[int] | None = None
    """Token IDs that can be sampled; all others are masked."""
    bad_words: list[str] | None = None
    """Words that must not be generated; at most {MAX_BAD_WORDS}."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must match: a JSON schema, a regular expression, a choice, a grammar."""
    thinking_token_budget: int | None = None
    """Maximum reasoning tokens; then the reasoning is ended. Default, and -1: no limit."""
    speculative: bool = True
    """Let the engine draft tokens for this request, if it does so. The output is the same."""
    extra_args: dict[str, Any] | None = None
    """Arguments for custom logits processors."""

    def __post_init__(self) -> None:
        self.validate()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """The parameters with the defaults for what is None."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self) -> SamplingParams:
        """A copy that can be changed on its own."""
        return copy.deepcopy(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether outputs have log-probabilities of their tokens."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_masked(self) -> bool:
        """Whether what may come next depends on what came before: see `penstock.structured`."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def validate(self) -> None:
        """Raise `InputError` for the first value that makes no sense."""
        check_int("n", self.n, 1, MAX_N)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_int("top_k", self.top_k, -1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InputError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, -1, 2**31 - 1)
        for name in FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(f"{name} must be True or False, got {value!r:.80}", name)
        if not isinstance(self.output_kind, OutputKind):
            raise InputError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r:.80}",
                "output_kind",
            )
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, -1, 2**31 - 1)
        self._validate_stops()
        self._validate_token_sets()
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise InputError(
                    f"{FIELD} must be StructuredOutputsParams, got {self.structured_outputs!r:.80}",
                    FIELD,
                )
            self.structured_outputs.validate()

    def _validate_stops(self) -> None:
        stops = self.stop_strings
        _check_items("stop", stops)
        _check_texts("stop", stops, MAX_STOP_STRINGS)
        if stops and not self.detokenize:
            raise InputError("stop needs detokenize=True: stop strings are matched in text", "stop")
        _check_items("stop_token_ids", self.stop_token_ids)
        for token_id in self.stop_token_ids or []:
            check_int("stop_token_ids", token_id, 0, 2**31 - 1)

    def _validate_token_sets(self) -> None:
        _check_items("allowed_token_ids", self.allowed_token_ids)
        _check_items("bad_words", self.bad_words)
        _check_items("logprob_token_ids", self.logprob_token_ids)
        named = self.logprob_token_ids or []
        if len(named) > MAX_LOGPROB_TOKEN_IDS:
            raise InputError(
                f"logprob_token_ids may contain at most {MAX_LOGPROB_TOKEN_IDS} token ids, "
                f"got {len(named)}",
                "logprob_token_ids",
            )
        for token_id in named:
            check_int("logprob_token_ids", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InputError("allowed_token_ids must not be empty", "allowed_token_ids")
        for token_id in self.allowed_token_ids or []:
            check_int("allowed_token_ids", token_id, 0, 2**31 - 1)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InputError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}",
                    "logit_bias",
                )
            if len(self.logit_bias) > MAX_BIAS_ENTRIES:
                raise InputError(
                    f"logit_bias may contain at most {MAX_BIAS_ENTRIES} entries, "
                    f"got {len(self.logit_bias)}",
                    "logit_bias",
                )
            for token_id, bias in self.logit_bias.items():
                check_int("logit_bias", token_id, 0, 2**31 - 1)
                check_float("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        _check_texts("bad_words", self.bad_words or [], MAX_BAD_WORDS)
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InputError(
                f"extra_args must be a dict, got {self.extra_args!r:.80}", "extra_args"
            )


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise `InputError` for the field `name` unless `value` is an integer from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be an integer, got {value!r}", name)
    if value < low:
        raise InputError(f"{name} must be at least {low}, got {_shown(value)}", name)
    if value > high:
        raise InputError(f"{name} must be at most {high}, got {_shown(value)}", name)


def check_float(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(f"{name} must be a finite number, got {value!r}", name)
    assert isinstance(value, (int, float))
    if value < low or value > high or (above and value == low):
        bound = f"above {low:g}" if above else f"at least {low:g}"
        raise InputError(f"{name} must be {bound} and at most {high:g}, got {_shown(value)}", name)


def _shown(value: float) -> str:
    """A number for an error message. Python refuses to write out integers that are too long."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return str(value) if bits <= 256 else f"an integer of {bits} bits"


def _check_texts(name: str, texts: Collection[str], most: int) -> None:
    if len(texts) > most:
        raise InputError(f"{name} may contain at most {most} strings, got {len(texts)}", name)
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT_LENGTH:
            raise InputError(
                f"{name} must contain non-empty strings of at most {MAX_TEXT_LENGTH} characters, "
                f"got {text!r:.80}",
                name,
            )
    if (length := sum(map(len, texts))) > MAX_TEXTS_LENGTH:
        raise InputError(
            f"{name} may be at most {MAX_TEXTS_LENGTH} characters long together, got {length}", name
        )


def _check_items(name: str, values: object) -> None:
    """A text is a collection too, of characters: nobody means that here."""
    if values is not None and not isinstance(values, (list, tuple, set, frozenset)):
        raise InputError(f"{name} must be a list, got {values!r:.80}", name)
