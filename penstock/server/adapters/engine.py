"""EngineAdapters: tells the engines to load and drop adapters."""

from __future__ import annotations

from penstock.engine.async_client import AsyncEngineClient
from penstock.protocol.adapter import Adapter


class EngineAdapters:
    """An `AdapterEngine` behind the client."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client

    async def load(self, adapter: Adapter, pin: bool, replica: int | None = None) -> None:
        method = "pin_adapter" if pin else "load_adapter"
        await self._client.call(method, adapter, replica=replica)

    async def unload(self, digest: str) -> None:
        await self._client.call("unload_adapter", digest)

    def end_requests(self, adapter: Adapter, error: Exception) -> None:
        records = self._client.records.values()
        ended = [item.request_id for item in records if item.request.adapter == adapter]
        self._client.fail(ended, error)
