"""EngineAdapters: tells the engine process to load and drop adapters."""

from __future__ import annotations

from penstock.engine.async_client import AsyncEngineClient
from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import InputError, RequestFault


class EngineAdapters:
    """An `AdapterEngine` behind the client."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client

    async def load(self, adapter: Adapter, pin: bool) -> None:
        try:
            await self._client.call("load_adapter", adapter, pin)
        except RequestFault as error:
            raise InputError(str(error), "lora_path") from error

    async def unload(self, digest: str) -> None:
        await self._client.call("unload_adapter", digest)

    def end_requests(self, adapter: Adapter, error: Exception) -> None:
        records = self._client.records.values()
        ended = [item.request_id for item in records if item.request.adapter == adapter]
        self._client.fail(ended, error)
