"""Starts an engine in another process together with its frontend, and turns deltas into outputs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from penstock.config import EngineConfig, ModelConfig
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.ledger import DeltaStream
from penstock.protocol.delta import FinishReason
from penstock.protocol.outputs import RequestOutput

if TYPE_CHECKING:
    from penstock.loading.source import ModelSource
    from penstock.text.frontend import Frontend, PreparedRequest


async def start_engine(
    client: AsyncEngineClient,
    config: EngineConfig,
    seeds: random.Random | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[EngineConfig, ModelSource, Frontend]:
    """Load the model in the engine. Meanwhile load the frontend and call `meanwhile`.

    Returns the configuration with the model that runs. See `Frontend` for seeds.
    """

    def find() -> tuple[EngineConfig, ModelSource]:
        from penstock.loading.speculators import find_model

        return find_model(config)

    def load_frontend(model: ModelConfig, source: ModelSource) -> Frontend:
        from penstock.text.frontend import Frontend

        # The engine reports max_model_len once it is ready.
        return Frontend(model, source, max_model_len=0, chat=config.chat, seeds=seeds)

    # The model is downloaded here, once, before the engine loads it.
    found, source = await asyncio.to_thread(find)
    loading = asyncio.ensure_future(client.load(found))
    try:
        frontend = await asyncio.to_thread(load_frontend, found.model, source)
        meanwhile()
        info = await loading
    finally:
        loading.cancel()
    from penstock.text.frontend import open_media

    frontend.max_model_len, frontend.pooling = info.limits.max_model_len, info.pooling
    open_media(frontend, found.media, source, info.limits)
    return found, source, frontend


async def outputs_of(
    stream: DeltaStream, requests: Sequence[PreparedRequest]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of `requests` from their delta stream, each with its request's index.

    The caller closes the stream.
    """
    from penstock.text.collector import OutputCollector

    collector = OutputCollector()
    indexes = {request.request_id: index for index, request in enumerate(requests)}
    for request in requests:
        collector.add(request)
    async for deltas in stream:
        changed, stopped = collector.take(deltas)
        if stopped:
            stream.finish(stopped, FinishReason.STOP)
        for request in changed:
            output = request.assembler.take()
            if output is not None:
                yield indexes[request.request_id], output
