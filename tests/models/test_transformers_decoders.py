"""Decoders of transformers, small, with the settings of their families: their logits through
Penstock's attention, in chunks and beside another request, are those of transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config import LoadConfig, ModelConfig
from penstock.layers.build import Build
from penstock.layers.context import ForwardContext, forward_context
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.load import load_weights
from penstock.loading.source import resolve_source
from penstock.models.architectures import LOGITS_BY_TRANSFORMERS
from penstock.models.registry import build_model
from penstock.ops.attention import AttentionMetadata
from penstock.ops.registry import Ops

if TYPE_CHECKING:
    from penstock.models.base import Model

BLOCK_SIZE = 16
SETTINGS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8,
    "max_position_embeddings": 128, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEFAULT = ["gpt2"]
KINDS = [
    kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow)
    for kind in LOGITS_BY_TRANSFORMERS
]


def make_reference(kind: str) -> Any:
    """A model of transformers with random weights, biases and norms."""
    config_class = transformers.CONFIG_MAPPING[kind]
    names = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    config = config_class(**{name: value for name, value in SETTINGS.items() if name in names})
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def load(folder: Path) -> Model:
    source = resolve_source(ModelConfig(model=str(folder)), LoadConfig())
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"))
    model = build_model(source.config, build, "transformers")
    checkpoint = open_checkpoint(source, LoadConfig())
    tensors = model.convert(checkpoint.tensors())
    load_weights(model, model.weights, tensors, len(checkpoint.names()), show_progress=False)
    model.check()
    return model


class Steps:
    """Runs single steps of a model on a cache of its own."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.caches = {
            name: torch.zeros(7, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
            for name, spec in model.kv_specs("float32").items()
        }

    def run(self, *parts: tuple[torch.Tensor, int, list[int]]) -> torch.Tensor:
        """Logits of tokens, which begin at a position and have the cache in these blocks."""
        lengths = [len(tokens) for tokens, _, _ in parts]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        ends = [start + length for (_, start, _), length in zip(parts, lengths, strict=True)]
        positions = [start + at for tokens, start, _ in parts for at in range(len(tokens))]
        slots = [
            blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for (_, start, blocks), end in zip(parts, ends, strict=True)
            for position in range(start, end)
        ]
        metadata = AttentionMetadata(
            query_starts=starts,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=torch.tensor([blocks for _, _, blocks in parts], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            num_decodes=0,
            max_query_len=max(lengths),
            max_seq_len=max(ends),
        )
        attention = dict.fromkeys(self.caches, metadata)
        rows = torch.zeros(len(slots), dtype=torch.long)
        with forward_context(ForwardContext(self.caches, attention, starts, rows)):
            embedded = self.model.embed(torch.cat([tokens for tokens, _, _ in parts]))
            hidden = self.model.forward(embedded, torch.tensor(positions))
        return self.model.logits(hidden, slice(None))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_in_chunks_and_beside_others_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    reference = make_reference(kind)
    reference.save_pretrained(tmp_path)
    tokens, other = torch.randint(3, 60, (40,)), torch.randint(3, 60, (30,))
    expected = [reference(each[None], use_cache=False).logits[0] for each in (tokens, other)]
    steps = Steps(load(tmp_path))
    first = steps.run((tokens[:25], 0, [1, 2, 3]))
    second = steps.run((other, 0, [4, 5, 0]), (tokens[25:], 25, [1, 2, 3]))
    ours = [torch.cat([first, second[30:]]), second[:30]]
    for own, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
