"""Requests to a running server: the command `replicas`, and text with `chat` and `complete`."""

from __future__ import annotations

import errno
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

from penstock.protocol.errors import ConfigError, PenstockError

Message = dict[str, Any]


class ServerRefusal(PenstockError):
    """The server refused a request, or there is none."""


class AnswerDelta(NamedTuple):
    """Some more of an answer."""

    text: str
    num_tokens: int = 0
    is_reasoning: bool = False  # text that comes before the answer


def open_url(
    url: str, body: Mapping[str, Any] | None, api_key: str | None
) -> http.client.HTTPResponse:
    """Send a request: POST with a body, else GET. There is no time limit.

    Raises `ServerRefusal` with the server's message, or with what to do if there is no server.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the server's URL must begin with http:// or https://, got {url!r}")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        response: http.client.HTTPResponse
        response = urllib.request.urlopen(request)  # nosec B310  # its scheme is checked
        return response
    except urllib.error.HTTPError as error:
        raise ServerRefusal(_message_of(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, OSError) and reason.errno == errno.ECONNREFUSED:
            raise ServerRefusal(
                f"no server answers at {url}: start one with penstock serve, or correct the URL"
            ) from error
        raise ServerRefusal(f"cannot reach {url}: {reason}") from error


def read_json(url: str, body: Mapping[str, Any] | None, api_key: str | None) -> Any:
    """The reply to a request."""
    with open_url(url, body, api_key) as response:
        try:
            return json.load(response)
        except ValueError as error:
            raise ServerRefusal(f"{url} does not answer in JSON: {error}") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answers {error.code} {error.reason}"


class RemoteModel:
    """A model behind an OpenAI-compatible API. `options` are fields of every request."""

    def __init__(
        self, url: str, name: str | None, api_key: str | None, options: Mapping[str, Any]
    ) -> None:
        url = url.rstrip("/")
        self._url = url if url.endswith("/v1") else f"{url}/v1"
        self._api_key = api_key
        self.name = name or self._first_model()
        self._options = {"model": self.name, "stream": True, **options}

    def _first_model(self) -> str:
        url = f"{self._url}/models"
        try:
            return str(read_json(url, None, self._api_key)["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerRefusal(f"{url} names no model: give one as --model-name") from error

    def chat(self, messages: list[Message]) -> Generator[AnswerDelta, None, None]:
        """Stream the answer to a conversation."""
        usage = {"stream_options": {"include_usage": True}}
        for chunk in self._stream("chat/completions", {"messages": messages, **usage}):
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning") or delta.get("reasoning_content")
                if reasoning:
                    yield AnswerDelta(str(reasoning), is_reasoning=True)
                if delta.get("content"):
                    yield AnswerDelta(str(delta["content"]))
            if chunk.get("usage"):
                yield AnswerDelta("", int(chunk["usage"].get("completion_tokens") or 0))

    def complete(self, prompt: str) -> Iterator[AnswerDelta]:
        """Stream the completion of a prompt."""
        for chunk in self._stream("completions", {"prompt": prompt}):
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    yield AnswerDelta(str(choice["text"]))

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with open_url(f"{self._url}/{path}", {**self._options, **body}, self._api_key) as response:
            try:
                for line in response:
                    text = line.decode(errors="replace").strip()
                    if not text.startswith("data:") or text.endswith("[DONE]"):
                        continue
                    chunk = json.loads(text.removeprefix("data:"))
                    if chunk.get("error"):
                        raise ServerRefusal(str(chunk["error"].get("message", chunk["error"])))
                    yield chunk
            except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
                raise ServerRefusal(f"the answer broke off: {error}") from error
