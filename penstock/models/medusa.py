"""Medusa: heads over a target's last hidden state. Head i drafts the token i + 2 positions on.

Checkpoints are those of the Medusa authors (``0.0.linear.weight``, ``0.1.weight``) and of vLLM
(``blocks.0.layers.0.weight``, ``lm_heads.0.weight``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import Linear, Part
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.config import read_int
from penstock.models.draft_vocabulary import DraftVocabulary


class ResBlocks(nn.Module):
    """x + silu(linear(x)), once per layer."""

    def __init__(self, build: Build, size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        layers = [Linear(build, size, [Part("", size, 1)], bias) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class Medusa(Model):
    """Not a model of its own: `logits_of` takes the place of `forward`."""

    def __init__(self, build: Build, raw: Mapping[str, Any], target: Model) -> None:
        """`raw`: as `medusa_settings` returns it."""
        super().__init__()
        self.vocab_size = read_int(raw, "vocab_size")
        self.hidden_size = size = read_int(raw, "hidden_size")
        self.num_heads, num_layers = read_int(raw, "num_heads"), read_int(raw, "num_layers")
        self.dtype = build.dtype
        bias = bool(raw["has_bias"])
        heads = range(self.num_heads)
        self.blocks = nn.ModuleList(ResBlocks(build, size, num_layers, bias) for _ in heads)
        self._project = target.logits  # not a part of this model: its weights are loaded
        self.lm_heads = nn.ModuleList()  # empty: all heads use the target's
        self.vocabulary: DraftVocabulary | None = None
        ignored = [r"^lm_heads?\."]
        if not raw["shares_lm_head"]:
            num_tokens = read_int(raw, "truncated_vocab_size", self.vocab_size)
            self.lm_heads.extend(VocabEmbedding(build, num_tokens, size) for _ in heads)
            ignored = []
            if num_tokens < self.vocab_size:
                self.vocabulary = DraftVocabulary(
                    "token_map", num_tokens, self.vocab_size, build.device
                )
        self.weights = WeightTable(
            ignored=(*ignored, *(() if self.vocabulary else (r"^token_map$",))),
            renamed={
                r"^medusa_heads?\.": "",
                r"^(\d+)\.(\d+)\.linear\.": r"blocks.\1.layers.\2.",
                rf"^(\d+)\.{num_layers}\.weight$": r"lm_heads.\1.weight",
                r"^token_map$": "vocabulary.token_map",
            },
        )

    def logits_of(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary from its hidden states, both [n, ...]."""
        states = self.blocks[head](states)
        if not len(self.lm_heads):
            return self._project(Hidden(states), slice(None))
        lm_head = self.lm_heads[head]
        assert isinstance(lm_head, VocabEmbedding)
        logits = lm_head.project(states)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)


def medusa_settings(raw: Mapping[str, Any], target: Model, names: list[str]) -> dict[str, Any]:
    """One set of names for the settings of both formats. `names`: of the checkpoint's tensors.

    The authors' files leave the target's sizes out, and no file says whether layers have biases.
    """

    def first(*keys: str) -> Any:
        return next((raw[key] for key in keys if raw.get(key) is not None), None)

    return {
        "num_heads": first("medusa_num_heads", "num_heads"),
        "num_layers": first("medusa_num_layers", "num_hidden_layers"),
        "vocab_size": first("vocab_size") or target.vocab_size,
        "hidden_size": first("hidden_size") or target.hidden_size,
        "truncated_vocab_size": first("truncated_vocab_size"),
        "shares_lm_head": raw.get("original_lm_head") is True,
        "has_bias": any(name.endswith(".bias") for name in names),
        "dtype": first("dtype", "torch_dtype"),
    }
