"""Where answers come from: an engine of its own, or any server with OpenAI's chat API."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from analysis import MAX_TOKENS, Model, Refused

MAX_REQUESTS = 16  # that a server gets at once
TIMEOUT_S = 600
FREQUENCY_PENALTY = 0.3  # small models repeat themselves


class LocalModel:
    """A model in a process of its own, which runs all requests as one batch."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.name = llm.config.model.model

    async def ask(self, messages: list[dict[str, str]], schema: dict[str, Any]) -> str:
        from penstock import RequestOutputKind, SamplingParams, StructuredOutputsParams
        from penstock.protocol.errors import InputError

        params = SamplingParams(
            temperature=0,
            frequency_penalty=FREQUENCY_PENALTY,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            outputs = [output async for output in self.llm.chat(messages, params)]
        except InputError as error:
            raise Refused(str(error)) from error
        (answer,) = outputs[-1].outputs
        if answer.finish_reason == "error":
            raise Refused(str(answer.error))
        return str(answer.text)


class RemoteModel:
    """A server at a URL such as http://localhost:8000/v1."""

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.name = name or self._first_model()
        self._places = asyncio.Semaphore(MAX_REQUESTS)

    async def ask(self, messages: list[dict[str, str]], schema: dict[str, Any]) -> str:
        body = {
            "model": self.name,
            "messages": messages,
            "temperature": 0,
            "frequency_penalty": FREQUENCY_PENALTY,
            "max_tokens": MAX_TOKENS,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
        }
        async with self._places:
            answer = await asyncio.to_thread(self._fetch, "/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (LookupError, TypeError) as error:
            raise Refused(f"{self.url} sent an answer without choices") from error

    def _first_model(self) -> str:
        served = self._fetch("/models").get("data")
        if not served:
            raise Refused(f"{self.url}/models lists no models: name one with --model")
        return str(served[0]["id"])

    def _fetch(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            detail = error.read(500).decode(errors="replace")
            raise Refused(f"{self.url}{path} answered {error.code}: {detail}") from error
        except (OSError, ValueError) as error:
            raise Refused(f"{self.url}{path} cannot be used: {error}") from error
        if not isinstance(answer, dict):
            raise Refused(f"{self.url}{path} sent something that is not a JSON object")
        return answer


@asynccontextmanager
async def open_model(
    name: str | None, url: str | None, api_key: str | None
) -> AsyncIterator[Model]:
    if url is not None:
        yield RemoteModel(url, name, api_key)
        return
    from penstock import AsyncLLM

    async with AsyncLLM(name, log_level="warning") as llm:
        yield LocalModel(llm)
