"""The page of all architectures: ``python -m penstock.models.docs > docs/models.md``."""

from __future__ import annotations

from penstock.models.architectures import ARCHITECTURES

_INTRODUCTION = """\
# Models

<!-- Written by `python -m penstock.models.docs > docs/models.md`; edit the table in
penstock/models/architectures.py. -->

A model runs if its `config.json` names one of these architectures. Of `.gguf` files, Llama,
Qwen 2 and Qwen 3 are read.

How each was verified: on every checkpoint named in the last column, which is small and random
(`tests/tiny_models.py`), greedy tokens in float32 on a CPU equal those of transformers, each
request alone and all in one batch (`tests/models/test_parity.py`). One checkpoint of each
architecture also gives the same tokens with prompts in chunks, from the prefix cache and after
preemption (`tests/models/test_*_models.py`). That says nothing of other precisions, of GPUs, or
of how well a real checkpoint answers.

[Adding a model](adding-a-model.md) says how to add one, here or in a package of your own.

| architecture | models | verified on |
|---|---|---|
"""


def render() -> str:
    """The whole page as Markdown."""
    rows, remarks = [], []
    for name, known in sorted(ARCHITECTURES.items()):
        checkpoints = ", ".join(f"`{variant}`" for variant in known.parity)
        rows.append(f"| `{name}` | {known.models} | {checkpoints} |\n")
        if known.remark:
            remarks.append(f"- `{name}`: {known.remark}\n")
    return _INTRODUCTION + "".join(rows) + "\n" + "".join(remarks)


if __name__ == "__main__":
    print(render(), end="")
