"""PoolingMethods: the methods of `LLM` for pooling models. They run requests in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from tqdm import tqdm

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
from penstock.text.frontend import Frontend, Prompt, read_prompt
from penstock.text.pooling import (
    Pair,
    PoolingPrompt,
    Truncation,
    join_pieces,
    pooling_info,
    prepare_pieces,
    prepare_pooling,
)
from penstock.text.scoring import (
    PromptedText,
    check_instruction,
    pair_up,
    score_kind,
    similarity,
    with_prompts,
)


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
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool each prompt. Returns one vector per prompt or per token, in order of the prompts."""
        requests, deltas = self._encode(
            prompts,
            pooling_params,
            pooling_task,
            use_tqdm,
            truncate_prompt_tokens,
            lora_request,
            priority,
        )
        return [
            pooling_output([request], delta)
            for request, delta in zip(requests, deltas, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt."""
        requests, deltas = self._encode(
            prompts,
            pooling_params,
            "embed",
            use_tqdm,
            truncate_prompt_tokens,
            lora_request,
            priority,
        )
        return [
            _output(request, delta, EmbeddingOutput(_vector(delta)))
            for request, delta in zip(requests, deltas, strict=True)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels for each prompt."""
        requests, deltas = self._encode(
            prompts,
            pooling_params,
            "classify",
            use_tqdm,
            truncate_prompt_tokens,
            lora_request,
            priority,
        )
        return [
            _output(request, delta, ClassificationOutput(_vector(delta)))
            for request, delta in zip(requests, deltas, strict=True)
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a reward model's scores, per prompt or per token, depending on the model."""
        info = pooling_info(self.frontend)
        if not info.num_labels:
            raise InputError(
                f"this model gives no rewards: it is served for {', '.join(info.tasks)}"
            )
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
            priority=priority,
        )

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
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text with each of several, or two lists pairwise.

        A cross-encoder reads both texts at once. For an embedding model the score is the cosine
        similarity of the embeddings: that of `data_1` with the model's prompt for queries, those of
        `data_2` with its prompt for documents. `instruction` is for rerankers whose template uses
        one.
        """
        info, truncation = pooling_info(self.frontend), Truncation(truncate_prompt_tokens)
        kind = score_kind(info)
        (adapter,) = self._adapters_of_pooled(lora_request, 1)
        pairs = pair_up(_texts("data_1", data_1), _texts("data_2", data_2))
        if kind == "cross-encoder":
            params = PoolingParams(task="classify", use_activation=use_activation)
            requests = [
                self._prepare_pooling(Pair(query, document, instruction), params, truncation)
                for query, document in pairs
            ]
            requests = with_adapter(requests, adapter)
            deltas = run_pooled(self.engine, requests, use_tqdm)
            return [
                _output(request, delta, ScoringOutput(_score(delta)))
                for request, delta in zip(requests, deltas, strict=True)
            ]
        check_instruction(info, instruction)
        compared = with_prompts(info, pairs)
        texts = list(dict.fromkeys(text for pair in compared for text in pair))
        by_text = {
            item: self._prepare_pooling(item.text, item.params, truncation) for item in texts
        }
        ran = run_pooled(self.engine, with_adapter(list(by_text.values()), adapter), use_tqdm)
        delta_of = dict(zip(texts, ran, strict=True))
        return [self._compare(by_text, delta_of, *pair) for pair in compared]

    def _compare(
        self,
        requests: Mapping[PromptedText, EngineRequest],
        deltas: Mapping[PromptedText, EngineDelta],
        first: PromptedText,
        second: PromptedText,
    ) -> ScoringRequestOutput:
        both = [deltas[first], deltas[second]]
        vectors = [_vector(delta) for delta in both]
        error = next((delta.error for delta in both if delta.error is not None), None)
        return PoolingRequestOutput(
            request_id=requests[first].request_id,
            outputs=ScoringOutput(None if error else similarity(*vectors)),
            prompt_token_ids=requests[first].prompt_token_ids + requests[second].prompt_token_ids,
            num_cached_tokens=sum(delta.num_cached_tokens for delta in both),
            error=error,
        )

    def _encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None,
        task: PoolingTask | None,
        use_tqdm: bool,
        truncate_prompt_tokens: int | None,
        lora_request: LoRARequestOrList,
        priority: Sequence[int] | None,
    ) -> tuple[list[EngineRequest], list[EngineDelta]]:
        several = isinstance(prompts, Iterable) and not isinstance(prompts, (str, Mapping))
        items: list[Any] = list(prompts) if several else [prompts]
        if priority is not None and len(priority) != len(items):
            raise InputError(
                f"priority must hold one number a prompt ({len(items)}), got {priority!r:.80}",
                "priority",
            )
        if params is not None and not isinstance(params, PoolingParams):
            raise InputError(
                f"pooling_params must be PoolingParams, got {params!r:.80}", "pooling_params"
            )
        own = msgspec.structs.replace(params or PoolingParams())
        own.task = own.task if task is None else task
        truncation = Truncation(truncate_prompt_tokens)
        adapters = self._adapters_of_pooled(lora_request, len(items))
        inputs = []
        for index, item in enumerate(items):
            prompt, cache_salt = read_prompt(item)
            of_it = 0 if priority is None else priority[index]
            pieces = self._prepare_pieces(prompt, own, truncation, of_it, cache_salt)
            inputs.append(with_adapter(pieces, adapters[index]))
        requests = [request for pieces in inputs for request in pieces]
        rest = iter(run_pooled(self.engine, requests, use_tqdm))
        info = pooling_info(self.frontend)
        joined = [
            join_pieces(info, own, pieces, list(itertools.islice(rest, len(pieces))))
            for pieces in inputs
        ]
        return [_as_one(pieces) for pieces in inputs], joined

    def _adapters_of_pooled(self, given: LoRARequestOrList, count: int) -> list[Adapter | None]:
        return self._lora_requests.load(given, count, self.engine, self.engine.step)

    def _prepare_pooling(
        self, prompt: PoolingPrompt, params: PoolingParams, truncation: Truncation
    ) -> EngineRequest:
        return prepare_pooling(
            self.frontend, str(next(self._ids)), prompt, params, truncation=truncation
        )

    def _prepare_pieces(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams,
        truncation: Truncation,
        priority: int,
        cache_salt: str | None,
    ) -> list[EngineRequest]:
        return prepare_pieces(
            self.frontend,
            str(next(self._ids)),
            prompt,
            params,
            truncation=truncation,
            priority=priority,
            cache_salt=cache_salt,
        )


def run_pooled(
    engine: EngineCore, requests: Sequence[EngineRequest], use_tqdm: bool
) -> list[EngineDelta]:
    """Run requests and return the last delta of each, in order. An exception aborts the rest."""
    unfinished = {request.request_id for request in requests}
    done: dict[str, EngineDelta] = {}
    bar = tqdm(total=len(requests), desc="Pooling", disable=not use_tqdm)
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


def _output(
    request: EngineRequest, delta: EngineDelta, outputs: PooledOutput
) -> PoolingRequestOutput[PooledOutput]:
    return PoolingRequestOutput(
        request_id=request.request_id,
        outputs=outputs,
        prompt_token_ids=request.prompt_token_ids,
        num_cached_tokens=delta.num_cached_tokens,
        error=delta.error,
    )


def pooling_output(
    pieces: Sequence[EngineRequest], delta: EngineDelta
) -> PoolingRequestOutput[PoolingOutput]:
    """The output of an input that was computed in these pieces and ended so."""
    request = _as_one(pieces)
    return _output(request, delta, PoolingOutput(_vector(delta), _named(request, delta)))


def _as_one(pieces: Sequence[EngineRequest]) -> EngineRequest:
    """Join the pieces of one input into one request with all tokens."""
    if len(pieces) == 1:
        return pieces[0]
    token_ids = [token_id for piece in pieces for token_id in piece.prompt_token_ids]
    return msgspec.structs.replace(pieces[0], prompt_token_ids=token_ids)


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


def _score(delta: EngineDelta) -> float | None:
    return None if delta.payload is None else float(delta.payload.to_numpy()[0])


def _texts(name: str, data: str | Sequence[str]) -> list[str]:
    texts = [data] if isinstance(data, str) else list(data)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} must be a text or a list of texts, got {data!r:.80}", name)
    return texts
