"""Logs HTTP requests (`access_log`), one line each when its response has ended."""

from __future__ import annotations

import logging
from urllib.parse import quote

from penstock.observability.logs import FIELDS
from penstock.server.http.exchange import HttpExchange

logger = logging.getLogger(__name__)


def log_exchange(exchange: HttpExchange) -> None:
    """Log a request without its headers and its query, which may hold secrets."""
    path = quote(exchange.path)  # a line stays a line
    fields = {
        "request_id": exchange.request_id,
        "client": exchange.client,
        "method": exchange.method,
        "path": path,
        "status": exchange.status,
        "num_bytes_received": exchange.num_bytes_received,
        "num_bytes_sent": exchange.num_bytes_sent,
        "duration_ms": round(exchange.duration_s * 1e3, 3),
    }
    logger.info(
        "%s %s %s %d, %d bytes in, %d out, %.1f ms, id %s",
        exchange.client or "-",
        exchange.method,
        path,
        exchange.status,
        exchange.num_bytes_received,
        exchange.num_bytes_sent,
        exchange.duration_s * 1e3,
        exchange.request_id,
        extra={FIELDS: fields},
    )
