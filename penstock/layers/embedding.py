"""The token embedding and the output projection, both sharded over the vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.build import Build


class VocabEmbedding(nn.Module):
    """Token embeddings, and the projection back onto the vocabulary where both are one matrix.

    Each rank holds a contiguous range of tokens; the last ranges are padded to one length.
    """

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, bias: bool = False) -> None:
        super().__init__()
        self.build = build
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // build.tp.size)
        self.first = build.tp.rank * self.rows
        self.hidden_size = hidden_size
        self.weight = build.empty(self.rows, hidden_size)
        self.bias = build.empty(self.rows) if bias else None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, hidden_size], whole on every rank."""
        if self.build.tp.size == 1:
            embedded: torch.Tensor = self.build.ops.embed(token_ids, self.weight)
            return embedded
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        embedded = self.build.ops.embed(local.masked_fill(elsewhere, 0), self.weight)
        return self.build.tp.all_reduce(embedded.masked_fill(elsewhere[:, None], 0.0))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states: [n, hidden_size] -> [n, vocab_size]."""
        logits = self.build.ops.linear(hidden, self.weight, self.bias)
        return self.build.tp.all_gather(logits)[:, : self.vocab_size]

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        shapes: dict[tuple[str, str], tuple[int, ...]] = {
            ("weight", ""): (self.vocab_size, self.hidden_size)
        }
        if self.bias is not None:
            shapes["bias", ""] = (self.vocab_size,)
        return shapes

    def load(self, parameter: str, part: str, tensor: torch.Tensor) -> None:
        target = getattr(self, parameter)
        shard = tensor[self.first : self.first + self.rows]
        target[: shard.shape[0]].copy_(shard)
        target[shard.shape[0] :].zero_()
