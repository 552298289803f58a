"""Bodies and replies of the pooling endpoints, with the names of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from penstock.protocol.pooling import PoolingTask, VectorName
from penstock.server.openai.protocol import ChatTemplateBody, Messages, RequestId
from penstock.server.schema.base import Body, Items, OpenBody, Reply, Seconds, Text, TokenId


def _explain(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError(
            "input",
            "must be a text, a list of texts, a list of token IDs or a list of such lists; items "
            "of one list must be of one kind, and token IDs from 0 on",
        ) from None


# One explanation in place of four, of what each alternative would have been.
Input = Annotated[
    Text | Items[TokenId] | Items[Text] | Items[Items[TokenId]], WrapValidator(_explain)
]
EncodingFormat = Literal["float", "base64"]
EmbedDtype = Literal["float32", "float16", "bfloat16"]

# -- requests


class PoolingBody(OpenBody):
    """What all of these requests have in common."""

    model: Text | None = Field(None, description="A name from /v1/models; the first by default.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Truncate each input to this many tokens; -1: the model's maximum."
    )
    priority: int | None = Field(None, description="Lower runs first, with --scheduling-policy.")
    cache_salt: Text | None = Field(
        None, description="Prefix-cache salt: only requests with the same salt share entries."
    )
    request_id: RequestId | None = Field(None, description="Included in the response's ID.")
    timeout: Seconds | None = Field(None, description="Timeout of the request in seconds.")
    user: Text | None = Field(None, description="Ignored.")


class InputBody(PoolingBody, ChatTemplateBody):
    """A request about inputs, each for itself: texts, tokens, or one conversation."""

    model_config = OpenBody.model_config  # not that of the last base
    input: Input | None = Field(
        None, description="One or more texts, as strings or token IDs. Exclusive with `messages`."
    )
    messages: Messages | None = Field(
        None, description="A conversation, rendered with the model's chat template."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Side that truncation removes tokens from; right by default."
    )
    add_generation_prompt: bool | None = Field(None, description="Off by default.")
    add_special_tokens: bool | None = Field(
        None, description="On by default for texts, off for messages."
    )


class EmbeddingRequest(InputBody):
    encoding_format: EncodingFormat | None = Field(None, description="float by default.")
    embed_dtype: EmbedDtype | None = Field(
        None, description="Data type of base64 output; float32 by default."
    )
    dimensions: int | None = Field(
        None, description="Size of the embedding; needs a matryoshka model."
    )
    use_activation: bool | None = Field(None, description="Set to false to skip normalization.")
    prompt_name: Text | None = Field(
        None, description="Name of the model's prompt to prepend to each text."
    )
    vectors: Items[VectorName] | None = Field(
        None, description="Of models with several kinds: which to return; dense by default."
    )


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = Field(None, description="Pooling task; the model's own by default.")


class ClassifyRequest(InputBody):
    use_activation: bool | None = Field(
        None, description="Set to false for logits instead of probabilities."
    )


class PairBody(PoolingBody):
    """A request about pairs of texts."""

    max_tokens_per_query: int | None = Field(
        None, description="Truncate queries to this many tokens; 0: no limit."
    )
    max_tokens_per_doc: int | None = Field(
        None, description="Truncate documents to this many tokens; 0: no limit."
    )
    instruction: Text | None = Field(
        None, description="Task instruction, for models whose template takes one."
    )
    use_activation: bool | None = Field(
        None, description="Set to false for logits instead of scores."
    )


Texts = Text | Items[Text]


class ScoreRequest(PairBody):
    """Under one of four pairs of names: one text with each of several, or each with its own."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = Field(None, description="Alias of `documents`.")
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankDocument(Body):
    text: Text


class RerankRequest(PairBody):
    query: Text
    documents: Items[Text | RerankDocument]
    top_n: int | None = Field(None, description="Number of results to return; 0 or null: all.")
    return_documents: bool | None = Field(None, description="On by default.")


class CohereImage(Body):
    url: Text


class CoherePart(Body):
    type: Literal["text", "image_url"]
    text: Text | None = None
    image_url: CohereImage | None = None


class CohereInput(Body):
    content: Items[CoherePart]


class CohereEmbedRequest(Body):
    """One of texts, images and inputs."""

    model: Text | None = None
    texts: Items[Text] | None = None
    images: Items[Text] | None = Field(None, description="URLs, usually data URLs.")
    inputs: Items[CohereInput] | None = Field(
        None, description="Texts and images. Each input has one embedding."
    )
    input_type: Text | None = Field(
        None, description="search_query, search_document, ...: selects the model's prompt."
    )
    embedding_types: Items[Text] | None = Field(
        None,
        description="float, base64, int8, uint8, binary and ubinary; float by default.",
    )
    output_dimension: int | None = Field(
        None, description="Same as `dimensions` of /v1/embeddings."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="Side to truncate when a text is too long; END by default."
    )
    max_tokens: int | None = Field(None, description="Truncate each text to this many tokens.")
    priority: int | None = Field(None, description="Lower runs first, with --scheduling-policy.")


# -- replies


class MediaTokens(Reply):
    image_tokens: int
    video_tokens: int


class PoolingUsage(Reply):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: MediaTokens | None = None  # of inputs with images or videos


class ListReply(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class SparseVector(Reply):
    token_ids: list[int]
    weights: list[float]


class EmbeddingData(Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    sparse: SparseVector | None = None
    colbert: list[list[float]] | str | None = None


class NamedVectors(Reply):
    dense: list[float] | str | None = None
    sparse: SparseVector | None = None
    colbert: list[list[float]] | str | None = None


class EmbeddingList(ListReply):
    data: list[EmbeddingData]


class PoolingData(Reply):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str | NamedVectors


class PoolingList(ListReply):
    data: list[PoolingData]


class Classification(Reply):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(ListReply):
    data: list[Classification]


class Score(Reply):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(ListReply):
    data: list[Score]


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
