"""PoolingParams: what a user may ask of a pooling model; and what a vector travels as."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from penstock.protocol.errors import InputError
from penstock.protocol.sampling import check_int
from penstock.protocol.vllm_fields import ParamsMeta

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
PoolingType = Literal["CLS", "LAST", "MEAN", "ALL"]  # ALL: every token has a vector of its own
# Of models with several kinds: one for the prompt, a weight for each token that occurs in it, one
# for each token.
VectorName = Literal["dense", "sparse", "colbert"]
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
# What models call their prompts for search, first choice first.
QUERY_PROMPTS = ("query", "search_query", "retrieval.query")
DOCUMENT_PROMPTS = ("document", "passage", "corpus", "search_document", "retrieval.passage")
VECTORS: tuple[VectorName, ...] = get_args(VectorName)


class PoolingParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag="pooling", metaclass=ParamsMeta
):
    """What to make of a prompt's hidden states."""

    # The text beneath a field is its help.
    task: PoolingTask | None = None
    """One vector for the prompt (embed, classify) or for each token (token_embed,
    token_classify); None: what the model is for."""
    dimensions: int | None = None
    """Keep the first so many numbers of an embedding; for models that were trained for it."""
    use_activation: bool | None = None
    """Normalize embeddings, turn logits into probabilities; None: as the model says."""
    prompt_name: str | None = None
    """Which of the model's prompts to put before the text; None: its default, if it has one."""
    vectors: list[VectorName] | None = None
    """Which vectors to return, of models with several kinds (bge-m3): dense, sparse, colbert;
    None: the dense one."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `InputError` for the first value that makes no sense."""
        if self.task is not None and self.task not in TASKS:
            raise InputError(
                f"task must be one of {', '.join(TASKS)}, got {self.task!r:.80}", "task"
            )
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, 2**31 - 1)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise InputError(
                f"prompt_name must be a string, got {self.prompt_name!r:.80}", "prompt_name"
            )
        if self.vectors is not None:
            self._check_vectors(self.vectors)
        if self.use_activation not in (None, True, False):
            raise InputError(
                f"use_activation must be True or False, got {self.use_activation!r:.80}",
                "use_activation",
            )

    def _check_vectors(self, names: object) -> None:
        is_list = isinstance(names, (list, tuple)) and len(names) > 0
        if not is_list or not all(name in VECTORS for name in names):  # type: ignore[attr-defined]
            raise InputError(
                f"vectors must be a list of {', '.join(VECTORS)}, got {names!r:.80}", "vectors"
            )


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Numbers, as the device wrote them: C order, little-endian."""

    shape: list[int]
    data: bytes
    dtype: str = "float32"  # numpy's name

    def to_numpy(self) -> Any:
        """A read-only array that shares the bytes."""
        import numpy as np  # for those who ask only

        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


# What a request's `vectors` come as, beside the dense one. Sparse: weights of token IDs.
NAMED: dict[VectorName, tuple[str, ...]] = {
    "dense": (),
    "sparse": ("sparse_token_ids", "sparse_weights"),  # int32 [n], ascending; float32 [n]
    "colbert": ("colbert",),  # [tokens, numbers]
}


class DualInputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The inputs of a dual encoder. Each is a text or an image."""

    num_tokens: int = 0  # texts are padded to so many; 0: they end with their first end token
    pads_left: bool = False
    end_token_id: int | None = None  # None: the largest token ID of a text ends it


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine's pooling model can do, once it is loaded."""

    tasks: list[PoolingTask]  # the first is what the model is for
    pooling_type: PoolingType
    embedding_size: int = 0  # 0: no embeddings
    vectors: list[VectorName] = []  # that one request may ask for, where there are several kinds
    num_labels: int = 0  # 0: no classifier
    labels: list[str] = []  # what they are called, where the model's files say so
    dimensions: list[int] = []  # that embeddings may be cut to
    any_dimension: bool = False  # or to any length
    reads_prefix_cache: bool = False  # a cached prefix lacks nothing that pooling needs
    score_template: str | None = None  # of a pair, with {query}, {document} and {instruction}
    score_instruction: str | None = None  # where a pair has none; None: a general one
    lower_case: bool = False  # texts are
    normalizes: bool = False  # embeddings, where a request does not say
    max_embed_len: int = 0  # tokens of an input that is embedded in pieces; 0: none is
    pools_prompt: bool = True  # off: a mean leaves out the tokens of what stands before a text
    prompts: dict[str, str] = {}  # what may stand before a text, by name
    default_prompt_name: str | None = None
    dual: DualInputs | None = None  # of a dual encoder

    def text_of(self, text: str, params: PoolingParams) -> str:
        """A text as the model was trained to read it."""
        text = self._prompt(params) + text
        return text.lower() if self.lower_case else text

    def first_prompt(self, names: Iterable[str]) -> str | None:
        """The first of these names that the model has a prompt for."""
        return next((name for name in names if name in self.prompts), None)

    def unpooled_text(self, params: PoolingParams) -> str:
        """What stands before a text and is not pooled."""
        return "" if self.pools_prompt else self.text_of("", params)

    def _prompt(self, params: PoolingParams) -> str:
        name = params.prompt_name
        if name is None:
            name = self.default_prompt_name
            return "" if name is None else self.prompts[name]
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InputError(
                f"prompt_name must be one of the model's prompts ({known}), got {name!r:.80}",
                "prompt_name",
            )
        return self.prompts[name]

    def check(self, params: PoolingParams, field: str = "task") -> PoolingTask:
        """The task that these mean. Raises InputError for what this model cannot do; `field` is
        where the user chose the task."""
        task = params.task or self.tasks[0]
        if task not in self.tasks:
            raise InputError(
                f"task {task!r} is not supported by this model; supported: "
                f"{', '.join(self.tasks)} (--convert chooses between embed and classify)",
                field,
            )
        self._check_vectors(params, task)
        wanted = params.dimensions
        if wanted is None:
            return task
        if task not in ("embed", "token_embed"):
            raise InputError(f"dimensions is for embeddings, not for task {task!r}", "dimensions")
        if not self.any_dimension and not self.dimensions:
            if wanted == self.embedding_size:
                return task
            raise InputError(
                "dimensions is for models trained with matryoshka representations, which this "
                f"one does not declare: leave it out for all {self.embedding_size}, or serve it "
                "with --pooler-config '{\"dimensions\": [...]}'",
                "dimensions",
            )
        allowed = [*self.dimensions, self.embedding_size]
        if self.any_dimension and wanted <= self.embedding_size:
            return task
        if wanted not in allowed:
            raise InputError(
                "dimensions must be "
                + (
                    f"from 1 to {self.embedding_size}"
                    if self.any_dimension
                    else f"one of {', '.join(map(str, sorted(set(allowed))))}"
                )
                + f", got {wanted}",
                "dimensions",
            )
        return task

    def _check_vectors(self, params: PoolingParams, task: PoolingTask) -> None:
        if params.vectors is None:
            return
        if task != "embed":
            raise InputError(f"vectors is for task 'embed', not for {task!r}", "vectors")
        known = self.vectors or ["dense"]
        for name in params.vectors:
            if name not in known:
                raise InputError(
                    f"vectors: this model has no {name} vectors, only {', '.join(known)}",
                    "vectors",
                )
