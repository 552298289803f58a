"""Bodies and replies of the pooling endpoints, with the names of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.protocol.pooling import PoolingTask
from penstock.server.openai.protocol import ChatTemplateBody, Messages, RequestId
from penstock.server.schema.base import Body, Items, Reply, Seconds, Text, TokenId

Input = Text | Items[TokenId] | Items[Text] | Items[Items[TokenId]]
EncodingFormat = Literal["float", "base64"]
EmbedDtype = Literal["float32", "float16", "bfloat16"]

# -- requests


class PoolingBody(Body):
    """What all of these requests have in common."""

    model: Text | None = Field(None, description="A name from /v1/models; the first by default.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep so many tokens of each input; -1: as many as the model takes."
    )
    priority: int | None = Field(None, description="Lower runs first, with --scheduling-policy.")
    cache_salt: Text | None = Field(None, description="Share cached prefixes under this salt only.")
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    timeout: Seconds | None = Field(None, description="Most seconds that the request may take.")
    user: Text | None = Field(None, description="Ignored.")


class InputBody(PoolingBody, ChatTemplateBody):
    """A request about inputs, each for itself: texts, tokens, or one conversation."""

    input: Input | None = Field(
        None, description="A text, several, or the same as token ids; or else `messages`."
    )
    messages: Messages | None = Field(
        None, description="A conversation, which the model's chat template makes a text of."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens are cut off; right by default."
    )
    add_generation_prompt: bool | None = Field(None, description="Off by default.")
    add_special_tokens: bool | None = Field(
        None, description="On by default for texts, off for messages."
    )


class EmbeddingRequest(InputBody):
    encoding_format: EncodingFormat | None = Field(None, description="float by default.")
    embed_dtype: EmbedDtype | None = Field(
        None, description="Of the numbers in base64; float32 by default."
    )
    dimensions: int | None = Field(
        None, description="Cut to so many numbers, of models that were trained for it."
    )
    use_activation: bool | None = Field(None, description="Off: do not normalize.")
    prompt_name: Text | None = Field(
        None, description="Which of the model's prompts stands before each text."
    )


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = Field(None, description="What the model is for, by default.")


class ClassifyRequest(InputBody):
    use_activation: bool | None = Field(None, description="Off: logits in place of probabilities.")


class PairBody(PoolingBody):
    """A request about pairs of texts."""

    max_tokens_per_query: int | None = Field(None, description="Cut queries; 0: no limit.")
    max_tokens_per_doc: int | None = Field(None, description="Cut documents; 0: no limit.")
    instruction: Text | None = Field(None, description="For models whose template has a place.")
    use_activation: bool | None = Field(None, description="Off: logits in place of scores.")


Texts = Text | Items[Text]


class ScoreRequest(PairBody):
    """Under one of four pairs of names: one text with each of several, or each with its own."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = Field(None, description="The same as documents.")
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankDocument(Body):
    text: Text


class RerankRequest(PairBody):
    query: Text
    documents: Items[Text | RerankDocument]
    top_n: int | None = Field(None, description="The best so many; 0 or none: all of them.")
    return_documents: bool | None = Field(None, description="On by default.")


class CohereEmbedRequest(Body):
    model: Text | None = None
    texts: Items[Text] | None = None
    input_type: Text | None = Field(
        None, description="search_query, search_document, ...: chooses the model's own prompt."
    )
    embedding_types: Items[Text] | None = Field(
        None, description="float, base64, binary and ubinary; float by default."
    )
    output_dimension: int | None = Field(None, description="As dimensions of /v1/embeddings.")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="What a text that is too long loses; END by default."
    )
    priority: int | None = Field(None, description="Lower runs first, with --scheduling-policy.")


# -- replies


class PoolingUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage


class PoolingData(Reply):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingList(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage


class Classification(Reply):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(Reply):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankResultDocument(Reply):
    text: str


class RerankResult(Reply):
    index: int
    relevance_score: float
    document: RerankResultDocument | None = None


class RerankReply(Reply):
    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class CohereEmbeddings(Reply):
    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[str, list[list[float]] | list[list[int]] | list[str]]
    texts: list[str]
    meta: dict[str, dict[str, str | int]]
