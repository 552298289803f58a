"""Generates the page of all architectures: ``python -m penstock.models.docs > docs/models.md``."""

from __future__ import annotations

import textwrap

from penstock.loading.gguf.architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from penstock.loading.gguf.towers import TOWERS
from penstock.models.architectures import (
    ARCHITECTURES,
    DUAL_ENCODERS,
    ENCODERS,
    LOGITS_BY_TRANSFORMERS,
    RUN_BY_TRANSFORMERS,
    VISION,
)

_INTRODUCTION = """\
# Models

<!-- Written by `python -m penstock.models.docs > docs/models.md`; edit the table in
penstock/models/architectures.py. -->

Penstock runs a model if its `config.json` names one of these architectures, or one that the
[transformers fallback](#transformers-fallback) supports. To add an architecture, here or in your
own package, see [Adding a model](adding-a-model.md).

**Verification.** The last column names small random checkpoints (`tests/tiny_models.py`). On each,
greedy tokens in float32 on a CPU equal those of transformers, each request alone and all in one
batch (`tests/models/test_parity.py`). One checkpoint of each architecture also gives the same
tokens with chunked prefill, prefix caching and preemption (`tests/models/test_*_models.py`,
`tests/models/test_combinations.py`). This does not cover other precisions, GPUs, or the quality of
real checkpoints.

| architecture | models | verified on |
|---|---|---|
"""

_ENCODERS = """
## Encoders

These models pool: they give embeddings and, with a classifier, labels and scores. Each architecture
runs with all of its heads: `Model`, `ForMaskedLM` (whose head is not loaded),
`ForSequenceClassification` and `ForTokenClassification`.

**Verification.** The last column names small random checkpoints (`tests/tiny_encoders.py`).
On each, the hidden states of all tokens and the logits of both classifiers are within 1e-4 of
transformers' in float32 on a CPU, each request alone and all in one batch
(`tests/models/test_encoders.py`).

| architecture | models | verified on |
|---|---|---|
"""

_VISION = """
## Vision-language models

These models take images, and some videos, in prompts and chats (docs/vision.md). Without, and with
`--language-model-only`, they are language models like any other.

**Verification.** The last column names small random checkpoints (`tests/tiny_vision.py`). On each,
greedy tokens in float32 on a CPU equal those of transformers, for images of five shapes, in chunks,
with a warm prefix cache and beside requests without images (`tests/models/test_vision.py`). With
`--runner pooling`, the vectors are within 1e-5 (`tests/models/test_vision_pooling.py`).

| architecture | models | verified on |
|---|---|---|
"""

_DUAL_ENCODERS = """
## Dual encoders

These models give embeddings of texts and of images in one space
([docs/pooling.md](pooling.md#embeddings-of-images)).

**Verification.** The last column names small random checkpoints (`tests/tiny_dual_encoders.py`).
On each, the vectors of texts and images in one batch are within 1e-5 of transformers' in float32 on
a CPU (`tests/models/test_dual_encoders.py`).

| architecture | models | verified on |
|---|---|---|
"""

_GGUF = """
## GGUF files

Files with these values of `general.architecture` are supported:

| in the file | models |
|---|---|
"""

_GGUF_VERIFIED = """
**Verification.** A small checkpoint of each is written as a GGUF file, with the gguf package's
tensor names and the changes that llama.cpp's converter makes (`tests/models/gguf_conversions.py`).
It gives the same tokens as from safetensors and as transformers
(`tests/models/test_gguf_models.py`). Llama, Qwen 2 and Qwen 3 are tested in `tests/loading`. A real
file, Gemma 3 270M in Q4_K_M, is tokenized as by llama.cpp and generates what transformers generates
from it (`tests/engine/test_gemma_gguf.py`).

- The models of the last rows run on the [transformers fallback](#transformers-fallback).
- A model that is split into several files is named by the first, `model-00001-of-00003.gguf`.
- Multi-token-prediction (MTP) layers are not loaded.
- Some settings are missing from the files, so those of the published models are used: the
  attention scale of Gemma 2 and 3 27B, the chunks, temperatures and norms of Llama 4, the rounding
  of gpt-oss's YaRN.
"""

_TOWERS = """
### Vision towers in GGUF files

The vision tower of a GGUF model is in a file of its own, whose name usually begins with `mmproj`.
It is read if it is in the same folder as the model's file, or if [`--mmproj`](vision.md#gguf-files)
names it. Files with these values of `clip.projector_type` are supported, for language models with
these values of `general.architecture`:

| in the file | models | language model |
|---|---|---|
"""

_TOWERS_VERIFIED = """
**Verification.** A small checkpoint of each is written as two GGUF files, with the gguf package's
tensor names and the changes that llama.cpp's converter makes (`tests/models/gguf_vision_files.py`).
They give transformers' tokens for prompts with images (`tests/models/test_gguf_vision.py`).

- The tower's weights are dequantized.
- Settings that the files do not have are those of the published models: the limits of an image's
  size and the windows of Qwen's towers, and how pixels are resized.
"""

_FALLBACK = """
## Transformers fallback

With transformers installed (`pip install 'penstock[transformers]'`), a causal language model of
transformers that is not in the table runs on transformers' modelling code. Attention, KV cache,
linear layers, embedding and loader are Penstock's; the rest of each layer is transformers'. Chunked
prefill, prefix caching, preemption, windows, soft caps, sinks and quantized weights work as in
other models. Only code that is part of transformers runs, never code that comes with a checkpoint.

| `--model-impl` | |
|---|---|
| `auto` | Penstock's implementation if there is one, else the fallback |
| `penstock` | Penstock's implementation only; other models are refused |
| `transformers` | the fallback, also for models in the table |

Layers run op by op, and on a GPU steps are not captured in CUDA graphs. The speed has not been
measured. These are refused at start, with the reason:

- several ranks (`tensor_parallel_size`)
- recurrent layers
- cross-attention, masks other than causal or a window, values and keys of different sizes, and
  attention that does not use transformers' attention interface
- rotary frequencies that change with the length of a request (`dynamic`, and `longrope` past its
  original length)

These were verified like those of the table, and with chunked prefill, prefix caching and preemption
(`tests/models/test_transformers_impl.py`):

| architecture | verified on |
|---|---|
"""

_LOGITS = """
For these values of `model_type` in `config.json`, logits of small random models in float32 on a CPU
were compared with those of transformers 5.22, with chunked prefill and beside another request
(`pytest -m "slow or not slow" tests/models/test_transformers_decoders.py`):
"""


def render() -> str:
    """The whole page as Markdown."""
    rows, remarks = [], []
    for name, known in sorted(ARCHITECTURES.items()):
        rows.append(f"| `{name}` | {known.models} | {_listed(known.parity)} |\n")
        if known.remark:
            remarks.append(f"- `{name}`: {known.remark}\n")
    encoders = [
        f"| `{name}` | {known.models} | {_listed(known.parity)} |\n"
        for name, known in ENCODERS.items()
        if name.endswith("Model")
    ]
    vision = [
        f"| `{name}` | {known.models} | {_listed(known.parity)} |\n"
        for name, known in VISION.items()
    ]
    duals = [
        f"| `{name}` | {known.models} | {_listed(known.parity)} |\n"
        for name, known in DUAL_ENCODERS.items()
    ]
    files = [f"| `{name}` | {known.models} |\n" for name, known in GGUF_ARCHITECTURES.items()]
    towers = [
        f"| `{name}` | {known.models} | {_listed(tuple(known.classes))} |\n"
        for name, known in TOWERS.items()
    ]
    others = [f"| `{name}` | {_listed(on)} |\n" for name, on in sorted(RUN_BY_TRANSFORMERS.items())]
    kinds = textwrap.fill(_listed(LOGITS_BY_TRANSFORMERS), 98, break_on_hyphens=False) + ".\n"
    table = (*rows, "\n", *remarks)
    fallback = (_FALLBACK, *others, _LOGITS, kinds)
    models = (_INTRODUCTION, *table, _VISION, *vision, _ENCODERS, *encoders)
    models = (*models, _DUAL_ENCODERS, *duals)
    files += [_GGUF_VERIFIED, _TOWERS, *towers, _TOWERS_VERIFIED]
    return "".join((*models, _GGUF, *files, *fallback))


def _listed(variants: tuple[str, ...]) -> str:
    return ", ".join(f"`{variant}`" for variant in variants)


if __name__ == "__main__":
    print(render(), end="")
