"""The attention metadata of a step, from the lengths of its requests."""

from __future__ import annotations

import itertools

import torch

from penstock.ops.attention import AttentionMetadata


def metadata_of(
    query_lens: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,  # [num_requests + padding, num_blocks]
    device: torch.device | None = None,
    any_order: bool = False,
    padding: int = 0,  # requests without a token, behind the others
    num_prompts: int = 0,
    decode_rows: int = 1,  # more: without `any_order`, every request is a decode of so many tokens
) -> AttentionMetadata:
    starts = list(itertools.accumulate(query_lens, initial=0))
    starts += starts[-1:] * padding
    decodes = sum(length == 1 for length in query_lens)
    return AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens + [0] * padding, dtype=torch.int32, device=device),
        block_table=block_table.to(device),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decodes=len(seq_lens) + padding if any_order or decode_rows > 1 else decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        any_order=any_order,
        num_prompts=num_prompts,
        num_prompt_rows=sum(query_lens[decodes : decodes + num_prompts]),
        decode_rows=decode_rows,
    )
