"""Log-probabilities of sampled and prompt tokens, and their conversion to the protocol's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops import sampling as reference
from penstock.ops.sampling import TopLogprobs
from penstock.protocol.step import TokenLogprobs


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of the rows that requested them."""

    rows: NDArray[np.int64]  # [n] row numbers
    counts: NDArray[np.int64]  # [n] requested top tokens of each row
    values: TopLogprobs  # of n rows, with the largest count

    def to_host(self) -> RowLogprobs:
        return RowLogprobs(self.rows, self.counts, self.values.to_host())

    def by_row(self) -> dict[int, TokenLogprobs]:
        """Log-probabilities by row. The copies to the host must be complete."""
        lists = token_logprobs(self.values, self.counts.tolist())
        return dict(zip(self.rows.tolist(), lists, strict=True))


def prompt_logprobs(logits: Tensor, target_token_ids: Tensor, k: int) -> TopLogprobs:
    """Log-probabilities of prompt tokens: row i of logits, [n, vocab], predicts target i.

    Adds the top k tokens of each row; -1: all. Memory grows with n * vocab; the caller chooses n.
    """
    return reference.top_logprobs(logits, target_token_ids, logits.shape[1] if k < 0 else k)


def token_logprobs(values: TopLogprobs, counts: Sequence[int]) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per row of host tensors: the token, then the top `count` tokens."""
    return [
        TokenLogprobs([token_id, *ids[:count]], [logprob, *logprobs[:count]], rank)
        for token_id, logprob, rank, ids, logprobs, count in zip(
            values.token_ids.tolist(),
            values.logprobs.tolist(),
            values.ranks.tolist(),
            values.top_ids.tolist(),
            values.top_logprobs.tolist(),
            counts,
            strict=True,
        )
    ]
