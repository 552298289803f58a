"""LLMEngine: steps under the caller's control, as vLLM's scripts have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.engine.arg_utils import EngineArgs
from penstock.engine.lora_requests import with_adapters
from penstock.llm import LLM
from penstock.protocol.adapter import LoRARequest
from penstock.protocol.errors import InputError
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import SamplingParams
from penstock.text.frontend import PreparedRequest
from penstock.text.prompts import Prompt, TokenizationKwargs, read_options


class LLMEngine(LLM):
    """An `LLM` whose requests are added one by one and advance with each `step`."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._requests: dict[str, PreparedRequest] = {}  # by the caller's id
        self._callers: dict[str, str] = {}  # the caller's id by ours

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(**dataclasses.asdict(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. Its outputs have this id, and hold what `output_kind` says.

        `tokenization_kwargs` may contain `add_special_tokens`. `arrival_time` and `trace_headers`
        are not needed: requests arrive now, and only the server writes traces.
        """
        if request_id in self._requests:
            raise InputError(f"request_id {request_id!r} is running already", "request_id")
        adapters = self._adapters_of(lora_request, 1)
        options = read_options(tokenization_kwargs, None)
        prepared = self._prepare(prompt, params, options, priority=priority, keep_kind=True)
        (request,) = with_adapters([prepared], adapters)
        self._submit([request])
        self._requests[request_id] = request
        self._callers[request.request_id] = request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without further output. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        aborted = [self._forget(request_id) for request_id in ids if request_id in self._requests]
        self._withdraw(aborted)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the new outputs, of none, some or all requests."""
        outputs = []
        for request in self._step():
            request_id = self._callers.get(request.request_id)
            output = request.assembler.take() if request_id is not None else None
            if request_id is None or output is None:
                continue
            output.request_id = request_id
            outputs.append(output)
            if output.finished:
                self._forget(request_id)
        return outputs

    def _forget(self, request_id: str) -> PreparedRequest:
        request = self._requests.pop(request_id)
        del self._callers[request.request_id]
        return request
