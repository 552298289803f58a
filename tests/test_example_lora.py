"""The example in docs/lora.md trains an adapter that the server can find."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import load_script
from worded_models import save_worded_model

from penstock.loading.adapters.source import adapter_digest, locate_adapter


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/train_lora.py")


class ByteTokenizer:
    """As much of a tokenizer as the example uses: a token for every byte."""

    eos_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"user: {messages[0]['content']}\nassistant: "

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def test_the_example_writes_an_adapter(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **counts)

    def load_model(name: None) -> tuple[LlamaForCausalLM, ByteTokenizer]:
        torch.manual_seed(0)
        return LlamaForCausalLM(config), ByteTokenizer()

    monkeypatch.setattr(example, "load_model", load_model)
    first = example.train(tmp_path / "short", None, num_steps=1, batch_size=2)
    last = example.train(tmp_path / "adapter", None, num_steps=30, batch_size=2)
    assert last < first
    found = locate_adapter(str(tmp_path / "adapter"))
    assert len(adapter_digest(found)) == 64
    assert json.loads((found / "adapter_config.json").read_text())["r"] == 8


def test_the_command_trains_for_a_model_of_ones_own(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_worded_model(tmp_path / "model")
    short = ["--model", str(model), "--steps", "1", "--batch-size", "1"]
    monkeypatch.setattr(sys, "argv", ["train_lora.py", str(tmp_path / "adapter"), *short])
    example.main()
    assert adapter_digest(locate_adapter(str(tmp_path / "adapter")))


def test_labels_cover_the_answer_alone(example: ModuleType) -> None:
    ids, labels = example.encode(ByteTokenizer(), "Where is it?", "shipping")
    assert len(ids) == len(labels)
    answer = [label for label in labels if label != -100]
    assert answer == [*b"shipping", 0]
    assert ids[-len(answer) :] == answer
