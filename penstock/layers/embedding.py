"""The token embedding and the LM head, both sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.layers.build import Build
from penstock.layers.loadable import Expected, Shape
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import DenseMethod, Shard
from penstock.ops.blocks import Weight


class VocabEmbedding(MatrixLayer):
    """Token embeddings, and the LM head if both share one matrix.

    Each rank holds a contiguous range of tokens. The last ranges are padded to the same length.
    """

    def __init__(self, build: Build, vocab_size: int, hidden_size: int) -> None:
        rows = -(-vocab_size // build.tp.size)
        super().__init__(build, hidden_size, {"": rows})
        self.vocab_size = vocab_size
        self.rows = rows
        self.first = build.tp.rank * rows
        self.hidden_size = hidden_size

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, hidden_size], the full vectors on every rank."""
        method = self.method
        if self.build.tp.size == 1:
            return method.embed(self, token_ids)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        embedded = method.embed(self, local.masked_fill(elsewhere, 0))
        return self.build.tp.all_reduce(embedded.masked_fill(elsewhere[:, None], 0.0))

    def project(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden states: [n, hidden_size] -> [n, vocab_size]; in `out` if given."""
        is_whole = isinstance(self.method, DenseMethod) and self.build.tp.size == 1
        if out is not None and is_whole and out.dtype == hidden.dtype:
            self.build.ops.linear(hidden, self.weight, None, out)
            return out
        logits = self.method.apply(self, hidden, None)
        logits = self.build.tp.all_gather(logits)[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        shape = (self.vocab_size, self.hidden_size)
        parameters = self.method.expected("", shape)
        return {(parameter, ""): expected for parameter, expected in parameters.items()}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        shape = (self.vocab_size, self.hidden_size)
        shard = Shard(shape, self.first, self.rows, 0, self.hidden_size)
        self.method.load(self, part, parameter, tensor, shard)
