"""Beam search: what a user asks for and gets, under the names vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from penstock.protocol.adapter import LoRARequest
from penstock.protocol.errors import InputError
from penstock.protocol.outputs import LogprobsAtPosition
from penstock.protocol.sampling import check_float, check_int
from penstock.protocol.vllm_fields import ParamsMeta

MAX_BEAM_WIDTH = 128


class BeamSearchParams(msgspec.Struct, omit_defaults=True, metaclass=ParamsMeta):
    beam_width: int
    """Number of sequences that are kept in each step, and returned."""
    max_tokens: int
    """Maximum tokens per sequence."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    temperature: float = 0.0
    """Only 0: beams are chosen by their probability."""
    length_penalty: float = 1.0
    """The score of a sequence is its log-probability divided by its length to this power."""
    include_stop_str_in_output: bool = False
    """Include the end-of-sequence token in the tokens."""

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.temperature != 0:
            raise InputError(
                f"temperature must be 0 with beam search, got {self.temperature!r:.80}: use "
                "SamplingParams with n to sample several completions",
                "temperature",
            )


@dataclass
class BeamSearchSequence:
    """A sequence of tokens and its score."""

    tokens: list[int]
    """All tokens, with those of the prompt."""
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the tokens after the prompt."""
    logprobs: list[LogprobsAtPosition] = field(default_factory=list)
    """For each of them, log-probabilities by token ID."""
    lora_request: LoRARequest | None = None
    """The adapter, if one was asked for."""
    text: str | None = None
    """The text of all tokens."""
    finish_reason: str | None = None
    """`stop` or `length`."""
    stop_reason: int | str | None = None
    """The end-of-sequence token that ended it."""


@dataclass
class BeamSearchOutput:
    """The sequences of a prompt, the best one first."""

    sequences: list[BeamSearchSequence]
    """At most `beam_width` of them."""
