"""HttpExchange: one HTTP request and its response, for metrics and the access log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class HttpExchange:
    """Complete when the response has ended, or its client has left."""

    request_id: str
    client: str  # address, or empty
    method: str
    path: str
    handler: str = "none"  # the route that matched, such as /v1/responses/{response_id}
    status: int = 499  # that the client left before any response; nginx's code for it
    num_bytes_received: int = 0
    num_bytes_sent: int = 0
    duration_s: float = 0.0


ExchangeObserver = Callable[[HttpExchange], None]
