"""A slow sampler for one row at a time, in plain Python and numpy, and helpers to set up tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.ops import sampling_cpu
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest
from penstock.runner.logits_processors import LogitsProcessor
from penstock.runner.sampler import ChooseTokens, Sampler, SamplingRows

VOCAB = 67
MAX_LEN = 48
NUM_SLOTS = 12
choose_tokens: ChooseTokens = sampling_cpu.choose_tokens  # or another, set in conftest.py


@dataclass
class FakeTables:
    token_ids: torch.Tensor = field(
        default_factory=lambda: torch.full((NUM_SLOTS, MAX_LEN), -1, dtype=torch.int32)
    )
    num_prompt_tokens: torch.Tensor = field(
        default_factory=lambda: torch.zeros(NUM_SLOTS, dtype=torch.int32)
    )


@dataclass
class Case:
    """One request and the tokens around the position to be sampled."""

    request: NewRequest
    tokens: list[int]  # what the table holds; may go on beyond `position`
    position: int
    logits: np.ndarray  # [VOCAB] float32


def make_request(
    prompt: list[int],
    seed: int = 0,
    eos: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
    **params: Any,
) -> NewRequest:
    return NewRequest(
        request_id="request",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=eos or [],
        bad_words_token_ids=bad_words or [],
    )


def make_sampler(
    tables: FakeTables, vocab: int = VOCAB, processors: tuple[LogitsProcessor, ...] = ()
) -> Sampler:
    return Sampler(tables, vocab, "cpu", choose_tokens, processors)


def set_up(
    cases: list[Case],
    slots: list[int] | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[Sampler, torch.Tensor, SamplingRows]:
    """A sampler that holds the cases' requests, their logits and their rows."""
    slots = list(range(len(cases))) if slots is None else slots
    tables = FakeTables()
    sampler = make_sampler(tables, VOCAB, processors)
    for slot, case in zip(slots, cases, strict=True):
        tables.token_ids[slot, : len(case.tokens)] = torch.tensor(case.tokens, dtype=torch.int32)
        tables.num_prompt_tokens[slot] = case.request.num_prompt_tokens
        sampler.add(slot, case.request)
    positions = [case.position for case in cases]
    rows = make_rows(slots, positions)
    return sampler, torch.from_numpy(np.stack([case.logits for case in cases])), rows


def make_rows(slots: list[int], positions: list[int]) -> SamplingRows:
    return SamplingRows(
        torch.tensor(slots), torch.tensor(positions), np.array(slots), max(positions)
    )


def sample_alone(case: Case) -> int:
    sampler, logits, rows = set_up([case])
    result = sampler.sample(logits, rows)
    assert not result.faulted.any()
    return int(result.token_ids[0])


def philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def gumbel(seed: int, position: int, token: int) -> float:
    counter = [position % 2**32, position >> 32, token // 4, 0]
    word = philox(counter, [seed % 2**32, seed >> 32])[token % 4]
    return -math.log(-math.log(((word >> 9) + 0.5) / 2**23))


def processed_logits(case: Case) -> list[float]:
    """The row after masks, bias and penalties, by the book."""
    params, history = case.request.params, case.tokens[: case.position]
    prompt, output = (
        history[: case.request.num_prompt_tokens],
        history[case.request.num_prompt_tokens :],
    )
    row = [float(value) for value in case.logits]
    if params.allowed_token_ids is not None:
        for token in range(VOCAB):
            if token not in params.allowed_token_ids:
                row[token] = -math.inf
    if len(output) < params.min_tokens:
        stops = list(params.stop_token_ids or [])
        if not params.ignore_eos:
            stops += case.request.eos_token_ids
        for token in stops:
            if token < VOCAB:
                row[token] = -math.inf
    for word in case.request.bad_words_token_ids:
        start = word[:-1]
        if len(start) <= len(history) and history[len(history) - len(start) :] == start:
            row[word[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        if token < VOCAB:
            row[token] += bias
    for token in range(VOCAB):
        if token in history:
            if row[token] > 0:
                row[token] /= params.repetition_penalty
            else:
                row[token] *= params.repetition_penalty
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty * (token in output)
    assert prompt == case.request.token_ids
    return row


def oracle(case: Case) -> int:
    params, row = case.request.params, processed_logits(case)
    if params.temperature == 0:
        return row.index(max(row))
    best = max(row)
    row = [(value - best) / params.temperature for value in row]
    kept = [token for token in range(VOCAB) if math.exp(row[token]) >= params.min_p]
    if params.top_k > 0:
        least = sorted(row, reverse=True)[min(params.top_k, VOCAB) - 1]
        kept = [token for token in kept if row[token] >= least]
    if params.top_p < 1:
        kept.sort(key=lambda token: -row[token])
        total = sum(math.exp(row[token]) for token in kept)
        before, nucleus = 0.0, []
        for token in kept:
            if before >= params.top_p * total:
                break
            nucleus.append(token)
            before += math.exp(row[token])
        kept = nucleus
    scores = {token: row[token] + gumbel(case.request.seed, case.position, token) for token in kept}
    return max(scores, key=lambda token: scores[token])
