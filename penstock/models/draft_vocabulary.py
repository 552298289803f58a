"""DraftVocabulary: which of the target's tokens a draft head with a smaller vocabulary has."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError


class DraftVocabulary(nn.Module):
    """Token ids of a head's logits, loaded from the checkpoint's tensor `stored`.

    `token_map` holds them. `d2t` holds the difference between a token's id in the target and here.
    """

    def __init__(
        self, stored: Literal["d2t", "token_map"], size: int, vocab_size: int, device: torch.device
    ) -> None:
        super().__init__()
        self.stored = stored
        self.vocab_size = vocab_size  # of the target
        self.register_buffer("token_ids", torch.arange(size, device=device))
        self.token_ids: torch.Tensor

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(self.stored, ""): tuple(self.token_ids.shape)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "token ids are not in blocks"
        ids = tensor.to(self.token_ids)
        if self.stored == "d2t":
            ids = ids + torch.arange(len(ids), device=ids.device)
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise ModelError(f"it names tokens outside the vocabulary of {self.vocab_size}")
        self.token_ids.copy_(ids)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, size] -> [n, vocab_size]. Tokens that are not drafted get -inf."""
        everything = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        everything[:, self.token_ids] = logits
        return everything
