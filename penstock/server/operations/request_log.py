"""RequestLog: logs every completion when it ends (`enable_log_requests`), without its texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from penstock.engine.observer import Observer, RequestRecord
from penstock.observability.logs import FIELDS

logger = logging.getLogger(__name__)


class RequestLog(Observer):
    """`name_of_key`: the name of the API key of a tenant, by its label, or empty."""

    def __init__(self, name_of_key: Callable[[str], str]) -> None:
        self._name_of_key = name_of_key

    def on_finish(self, record: RequestRecord) -> None:
        if not record.request.is_search_step:
            self._log(record)

    def on_search(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            self._log(record)

    def _log(self, record: RequestRecord) -> None:
        fields = self.fields_of(record)
        told = [f"{name} {value}" for name, value in fields.items() if name != "request_id"]
        logger.info(
            "Request %s ended: %s", record.request_id, ", ".join(told), extra={FIELDS: fields}
        )

    def fields_of(self, record: RequestRecord) -> dict[str, Any]:
        """What the log says about a request. Times are None if it did not get that far."""
        request = record.request
        assert record.finish_reason is not None
        fields: dict[str, Any] = {"request_id": record.request_id}
        if request.tenant:
            fields["key"] = self._name_of_key(request.tenant)
        if request.adapter is not None:
            fields["adapter"] = request.adapter.name
        fields |= {
            "finish_reason": record.finish_reason.value,
            "engine": record.replica,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_cached_tokens": record.num_cached_tokens,
            "num_output_tokens": len(record.token_ids),
            "queue_ms": None,
            "ttft_ms": None,
            "e2e_ms": _ms(record.finished_at, record.submitted_at),
        }
        if record.first_token_at is not None:
            waited_s = record.first_token_at - record.submitted_at
            fields["queue_ms"] = round(max(waited_s - record.prefill_s, 0.0) * 1e3, 3)
            fields["ttft_ms"] = round(waited_s * 1e3, 3)
        return fields


def _ms(end: float | None, start: float) -> float | None:
    return None if end is None else round((end - start) * 1e3, 3)
