"""The token embedding and the LM head, both sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from penstock.layers.build import Build
from penstock.layers.loadable import Expected, Shape
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import DenseMethod, Shard
from penstock.ops.blocks import Weight
from penstock.ops.sharded_sampling import VocabShard
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.layers.lora_vocab import EmbedSlots, HeadSlots


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
        self.shard: VocabShard | None = None  # of the logits; None: this rank has them all
        if build.tp.size > 1:
            num_tokens = min(vocab_size - self.first, rows)
            if num_tokens < 1:
                raise ConfigError(
                    f"tensor_parallel_size={build.tp.size} leaves a rank without any of the "
                    f"{vocab_size} tokens of the vocabulary: use fewer ranks"
                )
            self.shard = VocabShard(
                self.first, num_tokens, rows, vocab_size, build.tp.stack, build.ops
            )
        self.embed_adapter: EmbedSlots | None = None
        self.project_adapter: HeadSlots | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, hidden_size], the full vectors on every rank."""
        embedded = self._embed(token_ids)
        if self.embed_adapter is not None:
            embedded = self.embed_adapter(token_ids, embedded)
        return embedded

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        method = self.method
        if self.build.tp.size == 1:
            return method.embed(self, token_ids)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        embedded = method.embed(self, local.masked_fill(elsewhere, 0))
        return self.build.tp.all_reduce(embedded.masked_fill(elsewhere[:, None], 0.0))

    def project(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden states: [n, hidden_size] -> [n, vocab_size]; in `out` if given.

        If `out` has the width of a shard, it gets the logits of this rank's tokens alone.
        """
        is_own = (self.vocab_size if out is None else out.shape[1]) == self.rows
        is_dense = isinstance(self.method, DenseMethod)
        if out is not None and is_own and is_dense and out.dtype == hidden.dtype:
            self.build.ops.linear(hidden, self.weight, None, out)
            return self._adapted(hidden, out)
        logits = self._adapted(hidden, self.method.apply(self, hidden, None))
        if self.shard is not None and not is_own:
            logits = self.shard.whole(logits)
        return logits if out is None else out.copy_(logits)

    def _adapted(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Change the rows of this rank's logits that have an adapter, in place."""
        return logits if self.project_adapter is None else self.project_adapter(hidden, logits)

    def shard_of(self, part: str) -> tuple[slice, slice]:
        return slice(self.first, self.first + self.rows), slice(None)

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        shape = (self.vocab_size, self.hidden_size)
        parameters = self.method.expected("", shape)
        return {(parameter, ""): expected for parameter, expected in parameters.items()}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        shape = (self.vocab_size, self.hidden_size)
        shard = Shard(shape, self.first, self.rows, 0, self.hidden_size)
        self.method.load(self, part, parameter, tensor, shard)
