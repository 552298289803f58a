"""Suffix drafts over the token table and a ring of past outputs: what most often followed.

Programs share the places where a request's last tokens occur, in the request and in past outputs.
Each finds its longest match, the last one of that length. Of all programs, those with the longest
match vote for the drafts, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 1024
OWN_SPLITS = 8  # programs that share the tokens of a request
PAST_SPLITS = 56  # programs that share the past outputs
SHORTEST = 2  # tokens of a match
CONTEXT = 6  # tokens of the prompt's end that are kept before an output
MOST_OUTPUT_TOKENS = 1 << 13  # of one past output: its last ones
SEPARATOR: tl.constexpr = tl.constexpr(-1)  # behind a past output; no token
# A match is its length and the position after it, in one number.
LENGTH_SHIFT: tl.constexpr = tl.constexpr(40)
MOST_POSITION: tl.constexpr = tl.constexpr((1 << 40) - 1)


@dataclass(frozen=True)
class PastRing:
    """Past outputs on the device, the oldest of which are overwritten.

    A position counts all tokens that were ever appended; its place is the remainder.
    """

    token_ids: torch.Tensor  # [capacity] int32
    salts: torch.Tensor  # [capacity] int64: whose output it is
    window: torch.Tensor  # [2] int64: positions of the first token that counts and behind the last
    starts: torch.Tensor  # [most outputs] int64: where the last outputs begin

    @classmethod
    def make(cls, capacity: int, max_outputs: int, device: torch.device) -> PastRing:
        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        starts = zeros(min(max_outputs, capacity))
        return cls(zeros(capacity, torch.int32), zeros(capacity), zeros(2), starts)


@triton.jit
def _longest_match(
    texts_ptr, low, high, capacity, own_ptr, num_own, salts_ptr, salt, split, num_splits,
    IS_PAST: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The longest match with the end of `own` in a share of the positions from low to high."""
    best = tl.zeros([CHUNK], tl.int64)
    longest = tl.minimum(num_own, LONGEST)
    for at in range(low + split * CHUNK, high, num_splits * CHUNK):
        ends = at + tl.arange(0, CHUNK)  # positions after a match
        same = ends < high
        lengths = tl.zeros([CHUNK], tl.int32)
        back = 1
        num_same = CHUNK
        while (back <= longest) & (num_same > 0):
            same = same & (ends - back >= low)
            last = tl.load(own_ptr + num_own - back)
            before = tl.load(texts_ptr + (ends - back) % capacity, mask=same, other=SEPARATOR)
            same = same & (before == last)
            lengths += same.to(tl.int32)
            num_same = tl.sum(same.to(tl.int32), axis=0)
            back += 1
        found = lengths >= SHORTEST
        if IS_PAST:  # an output of another tenant does not count, nor one that ends here
            places = ends % capacity
            after = tl.load(texts_ptr + places, mask=found, other=SEPARATOR)
            found = found & (after != SEPARATOR)
            found = found & (tl.load(salts_ptr + places, mask=found, other=0) == salt)
        key = (lengths.to(tl.int64) << LENGTH_SHIFT) + ends
        best = tl.maximum(best, tl.where(found, key, 0))
    return tl.max(best, axis=0)


@triton.jit
def _match_kernel(
    slots_ptr, token_table_ptr, num_tokens_ptr, slot_salts_ptr,
    past_ptr, past_salts_ptr, window_ptr,
    found_ptr,  # [requests, OWN_SPLITS + PAST_SPLITS] int64; 0: no match
    token_stride, capacity,
    OWN_SPLITS: tl.constexpr, PAST_SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        return
    own = token_table_ptr + slot * token_stride
    num_own = tl.load(num_tokens_ptr + slot).to(tl.int64)
    salt = tl.load(slot_salts_ptr + slot)
    out = found_ptr + request * (OWN_SPLITS + PAST_SPLITS) + split
    if split < OWN_SPLITS:
        best = _longest_match(
            own, num_own * 0, num_own, num_own, own, num_own, past_salts_ptr, salt,
            split, OWN_SPLITS,
            IS_PAST=False, SHORTEST=SHORTEST, LONGEST=LONGEST, CHUNK=CHUNK,
        )  # fmt: skip
        tl.store(out, best)
    else:
        low, high = tl.load(window_ptr), tl.load(window_ptr + 1)
        best = _longest_match(
            past_ptr, low, high, capacity, own, num_own, past_salts_ptr, salt,
            split - OWN_SPLITS, PAST_SPLITS,
            IS_PAST=True, SHORTEST=SHORTEST, LONGEST=LONGEST, CHUNK=CHUNK,
        )  # fmt: skip
        tl.store(out, best)


@triton.jit(do_not_specialize=["num_drafts"])
def _vote_kernel(
    slots_ptr, token_table_ptr, num_tokens_ptr, past_ptr, window_ptr, found_ptr, drafts_ptr,
    token_stride, capacity, num_drafts,
    OWN_SPLITS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The most frequent token after the longest matches, then among those that agree with it.

    Of equally frequent tokens, that of the request's own text counts, then the most recent one. If
    the request's own text ends, it is taken to repeat itself from the match on.
    """
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        return
    own = token_table_ptr + slot * token_stride
    num_own = tl.load(num_tokens_ptr + slot).to(tl.int64)
    high = tl.load(window_ptr + 1)
    columns = tl.arange(0, COLUMNS)
    keys = tl.load(found_ptr + request * SPLITS + columns, mask=columns < SPLITS, other=0)
    lengths, ends = keys >> LENGTH_SHIFT, keys & MOST_POSITION
    longest = tl.max(lengths, axis=0)
    voting = (lengths == longest) & (keys > 0)
    is_own = columns < OWN_SPLITS
    priority = ends + tl.where(is_own, MOST_POSITION, 0)
    # Without a match, the last token is repeated: any valid token will do.
    draft = tl.load(own + num_own - 1)
    for index in range(num_drafts):
        repeated = ends + index % tl.maximum(num_own - ends, 1)
        tokens = tl.load(own + repeated, mask=voting & is_own, other=SEPARATOR)
        ahead = ends + index
        past = voting & (columns >= OWN_SPLITS) & (ahead < high)
        tokens = tl.where(
            is_own, tokens, tl.load(past_ptr + ahead % capacity, mask=past, other=SEPARATOR)
        )
        voting = voting & (tokens != SEPARATOR)
        agree = (tokens[:, None] == tokens[None, :]) & voting[None, :]
        votes = tl.where(voting, tl.sum(agree.to(tl.int32), axis=1), 0)
        most = tl.max(votes, axis=0)
        wins = voting & (votes == most)
        first = tl.max(tl.where(wins, priority, -1), axis=0)
        chosen = tl.max(tl.where(wins & (priority == first), tokens, SEPARATOR), axis=0)
        draft = tl.where(most > 0, chosen, draft)
        tl.store(drafts_ptr + request * num_drafts + index, draft)
        voting = voting & (tokens == draft)


@triton.jit(do_not_specialize=["slot", "salt", "count"])
def _append_kernel(
    token_table_ptr, num_tokens_ptr, num_prompt_ptr,
    past_ptr, past_salts_ptr, window_ptr, output_starts_ptr,
    slot, salt, count, max_outputs, token_stride, capacity,
    CONTEXT: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    num_tokens = tl.load(num_tokens_ptr + slot)
    begin = tl.maximum(tl.load(num_prompt_ptr + slot) - CONTEXT, num_tokens - MOST)
    begin = tl.maximum(begin, tl.maximum(num_tokens - capacity + 1, 0)).to(tl.int32)
    length = num_tokens - begin
    tokens = token_table_ptr + slot.to(tl.int64) * token_stride + begin
    start = tl.load(window_ptr + 1)
    for at in range(0, length, CHUNK):
        columns = at + tl.arange(0, CHUNK)
        mask = columns < length
        places = (start + columns) % capacity
        tl.store(past_ptr + places, tl.load(tokens + columns, mask=mask, other=0), mask=mask)
        tl.store(past_salts_ptr + places, salt.to(tl.int64), mask=mask)
    end = start + length
    tl.store(past_ptr + end % capacity, SEPARATOR)
    # The oldest output that counts was the last to be kept in the place behind this one's.
    oldest = tl.load(output_starts_ptr + (count + 1) % max_outputs)
    oldest = tl.where(max_outputs == 1, start, tl.where(count + 1 >= max_outputs, oldest, 0))
    tl.store(output_starts_ptr + count % max_outputs, start)
    tl.store(window_ptr, tl.maximum(oldest, end + 1 - capacity))
    tl.store(window_ptr + 1, end + 1)


def suffix_drafts(
    slots: torch.Tensor,  # [n] int64; -1 is padding
    token_table: torch.Tensor,  # [max_num_seqs, length] int32
    num_tokens: torch.Tensor,  # [max_num_seqs] int32
    slot_salts: torch.Tensor,  # [max_num_seqs] int64
    past: PastRing,
    num_drafts: int,
    longest: int,
) -> torch.Tensor:
    """Drafts [n, num_drafts] int32. Without a match, any tokens. Matches have 2 tokens or more."""
    num, splits = len(slots), OWN_SPLITS + PAST_SPLITS
    found = torch.empty((num, splits), dtype=torch.int64, device=slots.device)
    drafts = torch.empty((num, num_drafts), dtype=torch.int32, device=slots.device)
    stride, capacity = token_table.stride(0), len(past.token_ids)
    _match_kernel[(num, splits)](
        slots, token_table, num_tokens, slot_salts, past.token_ids, past.salts, past.window, found,
        stride, capacity, OWN_SPLITS=OWN_SPLITS, PAST_SPLITS=PAST_SPLITS,
        SHORTEST=SHORTEST, LONGEST=longest, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    _vote_kernel[(num,)](
        slots, token_table, num_tokens, past.token_ids, past.window, found, drafts,
        stride, capacity, num_drafts, OWN_SPLITS=OWN_SPLITS, SPLITS=splits,
        COLUMNS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return drafts


def append_output(
    past: PastRing,
    token_table: torch.Tensor,  # [max_num_seqs, length] int32
    num_tokens: torch.Tensor,  # [max_num_seqs] int32
    num_prompt_tokens: torch.Tensor,  # [max_num_seqs] int32
    slot: int,
    salt: int,
    count: int,  # outputs that were appended before
) -> None:
    """Keep the output of the request in a slot, and the end of its prompt."""
    _append_kernel[(1,)](
        token_table, num_tokens, num_prompt_tokens, past.token_ids, past.salts, past.window,
        past.starts, slot, salt, count, len(past.starts), token_table.stride(0),
        len(past.token_ids), CONTEXT=CONTEXT, MOST=MOST_OUTPUT_TOKENS, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
