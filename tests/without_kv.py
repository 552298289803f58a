"""Models that keep nothing in a KV cache, made of tiny Llamas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.layers.sublayers import RotaryAttention
from penstock.models.base import WeightTable
from penstock.models.llama import LlamaForCausalLM


class NoAttention(nn.Module):
    """Lets no token see another."""

    def forward(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        return torch.zeros_like(x)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next token follows from the last one alone, so that decoding needs no cache."""
    monkeypatch.setattr(LlamaForCausalLM, "attention", lambda self, index: NoAttention())
    monkeypatch.setattr(LlamaForCausalLM, "weights", WeightTable(ignored=(r"\.self_attn\.",)))


def encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder: every token sees the whole prompt, which one step has to compute."""

    def attention(self: LlamaForCausalLM, index: int) -> RotaryAttention:
        block = self.rotary_attention(index)
        block.attention.kind = "bidirectional"
        block.fused = None  # that one writes a cache
        return block

    monkeypatch.setattr(LlamaForCausalLM, "attention", attention)
