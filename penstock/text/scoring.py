"""Scores pairs of texts: from one request that reads both, or from the vector of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.protocol.errors import InputError
from penstock.protocol.pooling import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    PoolingInfo,
    PoolingParams,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# As published with Qwen3-Reranker. Without it, the model ranks at random.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# As published with Qwen3-VL-Reranker.
QWEN3_VL_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}"
    "<|im_end|>\n<|im_start|>assistant\n"
)
QWEN3_VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."

ScoreKind = Literal["cross-encoder", "bi-encoder"]


def score_kind(info: PoolingInfo) -> ScoreKind:
    """How this model scores a pair. Raises InputError if it cannot."""
    if "embed" in info.tasks:
        return "bi-encoder"
    if "classify" not in info.tasks:
        raise InputError(
            f"this model gives no scores of pairs: it is served for {', '.join(info.tasks)}"
        )
    if info.num_labels != 1:
        raise InputError(
            f"scores need a model with one label, and this one has {info.num_labels}: use /classify"
        )
    return "cross-encoder"


def served_tasks(info: PoolingInfo) -> list[str]:
    """The model's tasks, and "score" if it can score pairs."""
    try:
        score_kind(info)
    except InputError:
        return [*info.tasks]
    return [*info.tasks, "score"]


def check_instruction(info: PoolingInfo, instruction: str | None) -> None:
    """Raise InputError if an instruction is given that this model would not read."""
    if instruction is None or "{instruction}" in (info.score_template or ""):
        return
    raise InputError(
        "instruction is for rerankers whose template has a place for it; this model has none: "
        "leave it out, or set a score_template with {instruction} in --pooler-config"
        if info.num_labels
        else "instruction is for rerankers, and this is an embedding model: leave it out, or write "
        "it into the query",
        "instruction",
    )


class PromptedText(NamedTuple):
    """A text that an embedding model compares with others, and the prompt before it."""

    text: str
    prompt_name: str | None
    max_tokens: int | None = None  # of the text alone, which is cut to so many; 0 or None: all

    @property
    def params(self) -> PoolingParams:
        return PoolingParams(task="embed", prompt_name=self.prompt_name)


def with_prompts(
    info: PoolingInfo,
    pairs: Sequence[tuple[str, str]],
    max_query_tokens: int | None = None,
    max_document_tokens: int | None = None,
) -> list[tuple[PromptedText, PromptedText]]:
    """Queries with the model's prompt for queries, documents with that for documents; where it has
    none, with its default."""
    of_query, of_document = map(info.first_prompt, (QUERY_PROMPTS, DOCUMENT_PROMPTS))
    return [
        (
            PromptedText(query, of_query, max_query_tokens),
            PromptedText(document, of_document, max_document_tokens),
        )
        for query, document in pairs
    ]


def pair_up(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Pair one query with each document, or each query with its own document."""
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        raise InputError(
            f"there must be one query, or one per document: got {len(queries)} for "
            f"{len(documents)} documents"
        )
    return list(zip(queries, documents, strict=True))


def similarity(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    """The cosine of two vectors; 0 if one is zero."""
    import numpy as np  # only if requested

    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.dot(first, second)) / norm if norm else 0.0
