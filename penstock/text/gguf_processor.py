"""Writes what a model's processor of images is made from, for a model whose files are GGUF."""

from __future__ import annotations

import json

from penstock.loading.gguf.mmproj import processor_files
from penstock.loading.source import ModelSource
from penstock.media.messages import MediaSetup
from penstock.text.gguf_tokenizer import gguf_special_tokens, gguf_tokenizer


def media_setup(source: ModelSource) -> MediaSetup:
    """How media processes load the processor: from the checkpoint's folder, or from GGUF files."""
    if source.gguf is None or source.mmproj is None:
        return MediaSetup(str(source.path))
    files = processor_files(source.mmproj, source.config)
    files["tokenizer_config.json"] |= gguf_special_tokens(source.gguf.metadata)
    texts = {name: json.dumps(content) for name, content in files.items()}
    texts["tokenizer.json"] = gguf_tokenizer(source.gguf.metadata).to_str()
    return MediaSetup(str(source.path), texts)
