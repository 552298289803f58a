"""PoolingMethods: the methods of `LLM` for pooling models. They run requests in this process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
from tqdm import tqdm

from penstock.config.vllm_methods import refuse_arguments
from penstock.engine.core import EngineCore
from penstock.engine.heap import settled_heap
from penstock.engine.lora_requests import LoRARequestOrList, LoRARequests, with_adapter
from penstock.protocol.adapter import Adapter, LoRARequest
from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import InputError
from penstock.protocol.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.protocol.pooling import NAMED, PoolingParams, PoolingTask
from penstock.protocol.request import EngineRequest
from penstock.text.frontend import Frontend
from penstock.text.pooling import (
    InputOptions,
    InputTruncation,
    Pair,
    PoolingPrompt,
    join_pieces,
    pooling_info,
    prepare_pieces,
    read_pooling_prompt,
)
from penstock.text.prompts import (
    Prompt,
    TokenizationKwargs,
    read_options,
    with_priorities,
)
from penstock.text.scoring import (
    check_instruction,
    pair_up,
    score_kind,
    similarity,
    with_prompts,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.media.frontend import Processed


class EncodeOptions(TypedDict, total=False):
    """Keywords of `encode` that its variants take too."""

    use_tqdm: bool
    truncate_prompt_tokens: int | None
    lora_request: LoRARequestOrList
    priority: Sequence[int] | None
    tokenization_kwargs: TokenizationKwargs


class PoolingMethods:
    """The methods of `LLM` for pooling models. Other models raise `InputError`.

    A prompt that is too long raises `InputError`, unless `truncate_prompt_tokens` sets how many of
    its first tokens are kept (-1: as many as fit). `lora_request` is the LoRA adapter of all
    prompts, or a list with one or None for each. A request that fails while it runs has an `error`.
    The other requests are not affected.
    """

    frontend: Frontend
    engine: EngineCore
    _ids: itertools.count[int]
    _lora_requests: LoRARequests

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each prompt. Returns one vector per prompt or per token, in order of the prompts.

        `pooling_params` are those of all prompts, or a list with those of each.
        """
        truncation = InputTruncation(truncate_prompt_tokens)
        special = read_options(tokenization_kwargs, None).add_special_tokens
        items = with_priorities(prompts, priority)
        adapters = self._adapters_of_pooled(lora_request, len(items))
        inputs = []
        given = _params_for(len(items), pooling_params)
        for (item, order), own in zip(items, given, strict=True):
            task = own.task if pooling_task is None else pooling_task
            params = msgspec.structs.replace(own, task=task)
            prompt, cache_salt = read_pooling_prompt(item)
            options = InputOptions(truncation, special, order, cache_salt)
            inputs.append((prompt, params, options))
        return self._pool(inputs, adapters, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt."""
        found = self.encode(prompts, pooling_params, pooling_task="embed", **options)
        return [_replace(output, EmbeddingOutput(output.outputs.data)) for output in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels for each prompt."""
        found = self.encode(prompts, pooling_params, pooling_task="classify", **options)
        return [_replace(output, ClassificationOutput(output.outputs.data)) for output in found]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a reward model's scores, per prompt or per token, depending on the model."""
        info = pooling_info(self.frontend)
        if not info.num_labels:
            raise InputError(
                f"this model gives no rewards: it is served for {', '.join(info.tasks)}"
            )
        return self.encode(prompts, pooling_params, **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
        instruction: str | None = None,
        use_activation: bool | None = None,
        pooling_params: PoolingParams | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text with each of several, or two lists pairwise.

        `pooling_params` may set `use_activation`.

        A cross-encoder reads both texts at once. For an embedding model the score is the cosine
        similarity of the embeddings: that of `data_1` with the model's prompt for queries, those of
        `data_2` with its prompt for documents. `instruction` is for rerankers whose template uses
        one.
        """
        refuse_arguments(chat_template=chat_template)
        info = pooling_info(self.frontend)
        kind = score_kind(info)
        adapters = self._adapters_of_pooled(lora_request, 1)
        pairs = pair_up(_texts("data_1", data_1), _texts("data_2", data_2))
        special = read_options(tokenization_kwargs, None).add_special_tokens
        options = InputOptions(InputTruncation(truncate_prompt_tokens), special)
        if use_activation is None:
            use_activation = _activation_of(pooling_params)
        if kind == "cross-encoder":
            params = PoolingParams(task="classify", use_activation=use_activation)
            prompts = [Pair(query, document, instruction) for query, document in pairs]
            inputs = [(prompt, params, options) for prompt in prompts]
            found = self._pool(inputs, adapters * len(inputs), use_tqdm)
            return [_replace(output, ScoringOutput(_score(output.outputs))) for output in found]
        check_instruction(info, instruction)
        compared = with_prompts(info, pairs)
        texts = list(dict.fromkeys(text for pair in compared for text in pair))
        prompted = [(item.text, item.params, options) for item in texts]
        found = self._pool(prompted, adapters * len(prompted), use_tqdm)
        by_text = dict(zip(texts, found, strict=True))
        return [_compare(by_text[first], by_text[second]) for first, second in compared]

    def _adapters_of_pooled(self, given: LoRARequestOrList, count: int) -> list[Adapter | None]:
        return self._lora_requests.load(given, count, self.engine, self.engine.step)

    def _pool(
        self,
        inputs: Sequence[tuple[PoolingPrompt, PoolingParams, InputOptions]],
        adapters: Sequence[Adapter | None],
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        prepared = []
        media: list[Processed] = []  # their files are there until all requests ended
        for (prompt, params, options), adapter in zip(inputs, adapters, strict=True):
            own_id = str(next(self._ids))
            own = prepare_pieces(self.frontend, own_id, prompt, params, options)
            prepared.append((with_adapter(own.pieces, adapter), params))
            media += own.media
        requests = [piece for pieces, _ in prepared for piece in pieces]
        info, deltas = (
            pooling_info(self.frontend),
            iter(run_pooled(self.engine, requests, use_tqdm)),
        )
        return [
            pooling_output(
                pieces, join_pieces(info, params, pieces, list(islice(deltas, len(pieces))))
            )
            for pieces, params in prepared
        ]


def run_pooled(
    engine: EngineCore, requests: Sequence[EngineRequest], use_tqdm: bool
) -> list[EngineDelta]:
    """Run requests and return the last delta of each, in order. An exception aborts the rest."""
    unfinished = {request.request_id for request in requests}
    done: dict[str, EngineDelta] = {}
    bar = tqdm(total=len(requests), desc="Pooling", disable=None if use_tqdm else True)
    with bar as progress, settled_heap():
        try:
            for request in requests:
                engine.add(request)
            while unfinished:
                for delta in engine.step():
                    if delta.finish_reason is not None and delta.request_id in unfinished:
                        unfinished.discard(delta.request_id)
                        done[delta.request_id] = delta
                        progress.update()
        finally:
            if unfinished:
                engine.abort(list(unfinished))
            while engine.has_work():
                engine.step()
    return [done[request.request_id] for request in requests]


def pooling_output(
    pieces: Sequence[EngineRequest], delta: EngineDelta
) -> PoolingRequestOutput[PoolingOutput]:
    """The output of an input that was computed in these pieces and ended so."""
    return PoolingRequestOutput(
        request_id=pieces[0].request_id,
        outputs=PoolingOutput(_vector(delta), _named(pieces[0], delta)),
        prompt_token_ids=list(
            itertools.chain.from_iterable(piece.prompt_token_ids for piece in pieces)
        ),
        num_cached_tokens=delta.num_cached_tokens,
        error=delta.error,
    )


def _replace(
    output: PoolingRequestOutput[PoolingOutput], outputs: PooledOutput
) -> PoolingRequestOutput[PooledOutput]:
    """The same output in another form."""
    return PoolingRequestOutput(**{**vars(output), "outputs": outputs})


def _compare(
    first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    a, b = first.outputs.data, second.outputs.data
    return PoolingRequestOutput(
        request_id=first.request_id,
        outputs=ScoringOutput(None if a is None or b is None else similarity(a, b)),
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        error=first.error if first.error is not None else second.error,
    )


def _vector(delta: EngineDelta) -> Any:
    return None if delta.payload is None else delta.payload.to_numpy()


def _named(request: EngineRequest, delta: EngineDelta) -> dict[str, Any]:
    """The vectors that a request asked for by name."""
    params = request.params
    if not isinstance(params, PoolingParams) or delta.payload is None:
        return {}
    found: dict[str, Any] = {}
    for name in params.vectors or ():
        arrays = [delta.named[part].to_numpy() for part in NAMED[name]]
        if name == "sparse":
            found[name] = dict(zip(*(array.tolist() for array in arrays), strict=True))
        else:
            found[name] = arrays[0] if arrays else _vector(delta)
    return found


def _score(output: PoolingOutput) -> float | None:
    return None if output.data is None else float(output.data[0])


def _params_for(
    count: int, given: PoolingParams | Sequence[PoolingParams] | None
) -> Sequence[PoolingParams]:
    if given is None or isinstance(given, PoolingParams):
        return [PoolingParams() if given is None else given] * count
    is_list = isinstance(given, Sequence) and len(given) == count
    if not is_list or not all(isinstance(item, PoolingParams) for item in given):
        raise InputError(
            f"pooling_params must be PoolingParams, or a list with those of each of {count} "
            f"prompts, got {given!r:.80}",
            "pooling_params",
        )
    return given


def _activation_of(params: PoolingParams | None) -> bool | None:
    """`use_activation` of the parameters for `score`, which may set nothing else."""
    if params is None:
        return None
    if msgspec.structs.replace(params, use_activation=None, task=None) != PoolingParams():
        raise InputError(
            f"pooling_params of score may set use_activation only, got {params!r:.160}",
            "pooling_params",
        )
    return params.use_activation


def _texts(name: str, data: str | Sequence[str]) -> list[str]:
    texts = [data] if isinstance(data, (str, Mapping)) else list(data)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{name} must be a text or a list of texts, got {data!r:.80}; for pairs with images, "
            "write the prompts of the reranker's template and use classify (docs/pooling.md)",
            name,
        )
    return texts
