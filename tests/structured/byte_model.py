"""A tiny random model whose tokens are single bytes: every character beyond ASCII is several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_engine
from tiny_models import make_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock import LLM
from penstock.text.detokenizer import byte_level_alphabet

SPECIAL = ["<pad>", "<s>", "</s>", "<call>", "</think>"]  # ids 0 to 4; 2 ends a text
VOCAB_SIZE = 256 + len(SPECIAL)


def make_byte_tokenizer() -> Tokenizer:
    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    tokens = SPECIAL + [spelled[byte] for byte in range(256)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return backend


def make_byte_model(folder: Path) -> Path:
    """A checkpoint with weights and tokenizer.json. Its logits have more rows than there are
    tokens, as in models whose vocabulary is padded."""
    make_checkpoint(folder, "llama", vocab_size=VOCAB_SIZE + 11)
    make_byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return folder


def open_llm(model: str, **options: Any) -> LLM:
    """An engine with a small cache for a checkpoint with a tokenizer."""
    settings = {"skip_tokenizer_init": False, "max_model_len": 128} | options
    return tiny_engine.open_llm(model, **settings)
