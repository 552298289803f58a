"""The page of all architectures: ``python -m penstock.models.docs > docs/models.md``."""

from __future__ import annotations

import textwrap

from penstock.loading.gguf.architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from penstock.models.architectures import (
    ARCHITECTURES,
    LOGITS_BY_TRANSFORMERS,
    RUN_BY_TRANSFORMERS,
)

_INTRODUCTION = """\
# Models

<!-- Written by `python -m penstock.models.docs > docs/models.md`; edit the table in
penstock/models/architectures.py. -->

A model runs if its `config.json` names one of these architectures, or one that transformers' code
can [run](#what-transformers-runs). [Adding a model](adding-a-model.md) says how to add one, here
or in a package of your own.

How each was verified: on every checkpoint named in the last column, which is small and random
(`tests/tiny_models.py`), greedy tokens in float32 on a CPU equal those of transformers, each
request alone and all in one batch (`tests/models/test_parity.py`). One checkpoint of each
architecture also gives the same tokens with prompts in chunks, from the prefix cache and after
preemption (`tests/models/test_*_models.py`, `tests/models/test_combinations.py`). That says
nothing of other precisions, of GPUs, or of how well a real checkpoint answers.

| architecture | models | verified on |
|---|---|---|
"""

_GGUF = """
## GGUF files

Read are files of these `general.architecture`s:

| in the file | models |
|---|---|
"""

_GGUF_VERIFIED = """
How each was verified: one of the small checkpoints, written as a GGUF file under the names that the
gguf package has for it, with the changes that llama.cpp's converter makes
(`tests/models/gguf_conversions.py`), gives the same tokens as from safetensors and as transformers
(`tests/models/test_gguf_models.py`); Llama, Qwen 2 and Qwen 3 are tested in `tests/loading`.

A real file, Gemma 3 270M in Q4_K_M, has the tokens of llama.cpp and generates what transformers
does from it (`tests/engine/test_gemma_gguf.py`).

The last rows are of models that transformers' code [runs](#what-transformers-runs). A model that is
split into several files is named by the first, `model-00001-of-00003.gguf`. Layers that predict
further tokens (MTP), and the part of a model that reads images, are not read.

Some settings are in no file, so those of the published models are used: the scale of scores in
Gemma 2 and 3 27B, the chunks, temperatures and norms of Llama 4, the rounding of gpt-oss's YaRN.
"""

_FALLBACK = """
## What transformers runs

With transformers installed (`pip install 'penstock[transformers]'`), an architecture that is not
in the table, and is a causal language model of transformers, runs on transformers' own modelling
code. Attention, its cache, linear layers, the embedding and the loader are Penstock's; the rest
of each layer is transformers'. Chunks, prefix caching, preemption, windows, soft caps, sinks and
quantized weights work as in other models. `--model-impl` chooses: `auto` is the above,
`penstock` refuses such models, `transformers` runs also those of the table that way. Only code
that is part of transformers runs: code that comes with a checkpoint never does.

Its layers run part by part, and a GPU's steps are not recorded and replayed; how fast that is was
not measured. Refused at start, with the reason: several ranks (`tensor_parallel_size`); recurrent
layers; attention to another sequence, with masks other than causal or a window, with values and
keys of different sizes, or that does not go through transformers' attention interface; rotary
frequencies that change with the length of a request (`dynamic`, and `longrope` past its first
length).

Verified as those of the table, and with prompts in chunks, from the prefix cache and after
preemption (`tests/models/test_transformers_impl.py`), were:

| architecture | verified on |
|---|---|
"""

_LOGITS = """
Of these kinds of models (`model_type` in `config.json`), small and random, logits in float32 on a
CPU were compared with those of transformers 5.22, with prompts in chunks and beside another request
(`pytest -m "slow or not slow" tests/models/test_transformers_decoders.py`):
"""


def render() -> str:
    """The whole page as Markdown."""
    rows, remarks = [], []
    for name, known in sorted(ARCHITECTURES.items()):
        rows.append(f"| `{name}` | {known.models} | {_listed(known.parity)} |\n")
        if known.remark:
            remarks.append(f"- `{name}`: {known.remark}\n")
    files = [f"| `{name}` | {known.models} |\n" for name, known in GGUF_ARCHITECTURES.items()]
    others = [f"| `{name}` | {_listed(on)} |\n" for name, on in sorted(RUN_BY_TRANSFORMERS.items())]
    kinds = textwrap.fill(_listed(LOGITS_BY_TRANSFORMERS), 98, break_on_hyphens=False) + ".\n"
    table = (*rows, "\n", *remarks)
    fallback = (_FALLBACK, *others, _LOGITS, kinds)
    return "".join((_INTRODUCTION, *table, _GGUF, *files, _GGUF_VERIFIED, *fallback))


def _listed(variants: tuple[str, ...]) -> str:
    return ", ".join(f"`{variant}`" for variant in variants)


if __name__ == "__main__":
    print(render(), end="")
